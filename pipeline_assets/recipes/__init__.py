"""The built-in recipes, one YAML file each."""

BUILT_IN = ("sample", "fineweb-lab", "fineweb-edu", "mixture")
DEFAULT_RECIPE = "sample"
