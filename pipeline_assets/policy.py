"""splits: the recipe's assignment, as the transform takes them."""

from pipeline_assets.sections.splits import FractionSplit, Splits
from pipeline_assets.transforms.split import BudgetPolicy, FractionPolicy


def policy_of(splits: Splits) -> FractionPolicy | BudgetPolicy:
    """The recipe's assignment as the transform's policy."""
    assignment = splits.assignment
    if isinstance(assignment, FractionSplit):
        return FractionPolicy(
            seed=assignment.seed,
            validation_fraction=assignment.validation_fraction,
            test_fraction=assignment.test_fraction,
        )
    return BudgetPolicy(validation_tokens=assignment.validation_tokens, test_tokens=assignment.test_tokens)
