"""Event files: TensorBoard reads exactly what was written, and a resumed run repeats no step."""

import sys
from collections import Counter

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from training_io.errors import RecipeError
from training_io.event_files import EventFiles
from training_io.progress import Evaluated, Positions, Progress


def progress_at(step, **changes):
    values = {
        "step": step,
        "steps": 100,
        "loss": 9.0 - step / 10,
        "gradient_norm": 0.1 + step,
        "learning_rate": 0.01 / step,
        "validation_loss": 8.5,
        "evaluations": (Evaluated(step=step, loss=8.5, by_pool={"prose": 8.25, "code": 8.75}),),
        "tokens": 1_024 * step,
        "positions": Positions(),
        "tokens_per_second": 2_000.0 + step,
        "mfu": None,
        "eta_seconds": 1.0,
    }
    return Progress(**(values | changes))


def write(folder, *steps):
    files = EventFiles(folder)
    for progress in steps:
        files.write(progress)
    files.close()


def read_by_tensorboard(folder):
    """(step, tag, value) as TensorBoard's own loader gives them."""
    found = []
    for path in sorted(folder.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, value.tag, value.tensor.float_val[0]) for value in event.summary.value]
    return found


def test_tensorboard_reads_what_was_written(tmp_path):
    evaluated = (Evaluated(step=20, loss=7.1, by_pool={"prose": 7.1}),)
    write(tmp_path, progress_at(10), progress_at(20, evaluations=evaluated, mfu=0.41))
    expected = {
        (10, "loss"): 8.0, (10, "gradient_norm"): 10.1, (10, "learning_rate"): 0.001, (10, "tokens_per_second"): 2_010,
        (10, "validation/loss"): 8.5, (10, "validation/loss_of_prose"): 8.25, (10, "validation/loss_of_code"): 8.75,
        (20, "loss"): 7.0, (20, "gradient_norm"): 20.1, (20, "learning_rate"): 0.0005,
        (20, "tokens_per_second"): 2_020, (20, "mfu"): 0.41, (20, "validation/loss"): 7.1,
        (20, "validation/loss_of_prose"): 7.1,
    }  # fmt: skip
    found = read_by_tensorboard(tmp_path)
    assert {(step, tag): value for step, tag, value in found} == {k: np.float32(v) for k, v in expected.items()}
    assert len(found) == len(expected)


def evaluations_at(*points):
    return tuple(Evaluated(step=step, loss=loss, by_pool={}) for step, loss in points)


def validation_in(folder):
    found = [(step, float(value)) for step, tag, value in read_by_tensorboard(folder) if tag == "validation/loss"]
    return sorted(found)


def test_each_evaluation_is_written_at_its_own_step_equal_ones_as_well(tmp_path):
    told = {10: [(0, 8.0), (7, 6.0)], 20: [(14, 6.0)], 30: []}
    write(tmp_path, *[progress_at(step, evaluations=evaluations_at(*points)) for step, points in told.items()])
    assert validation_in(tmp_path) == [(0, 8.0), (7, 6.0), (14, 6.0)]


@pytest.mark.parametrize("told_before", [10, 20, 30])
def test_a_resumed_run_writes_an_evaluation_before_its_first_step_once(tmp_path, told_before):
    """It goes on behind 15: what it tells at 20 came before, whether the first try told of it or not."""
    told = {10: [(0, 8.0), (7, 6.0)], 20: [(15, 5.0)], 30: [(30, 1.0)]}
    first = {step: points for step, points in told.items() if step <= told_before}
    write(tmp_path, *[progress_at(step, evaluations=evaluations_at(*points)) for step, points in first.items()])
    again = {20: [(15, 5.0)], 30: [(30, 4.0)]}
    write(tmp_path, *[progress_at(step, evaluations=evaluations_at(*points)) for step, points in again.items()])
    assert validation_in(tmp_path) == [(0, 8.0), (7, 6.0), (15, 5.0), (30, 4.0)]
    assert sorted(step for step, tag, _ in read_by_tensorboard(tmp_path) if tag == "loss") == [10, 20, 30]


def test_a_run_without_validation_writes_none(tmp_path):
    write(tmp_path, progress_at(10, validation_loss=None, evaluations=()))
    assert {tag for _, tag, _ in read_by_tensorboard(tmp_path)} == {
        "loss", "gradient_norm", "learning_rate", "tokens_per_second",
    }  # fmt: skip


@pytest.mark.parametrize("first_again", [10, 20, 30, 40])
def test_a_resumed_run_repeats_no_step(tmp_path, first_again):
    write(tmp_path, *[progress_at(step, loss=1.0) for step in (10, 20, 30)])
    write(tmp_path, *[progress_at(step, loss=2.0) for step in range(first_again, 50, 10)])
    losses = [(step, value) for step, tag, value in read_by_tensorboard(tmp_path) if tag == "loss"]
    assert sorted(losses) == [(step, 1.0 if step < first_again else 2.0) for step in (10, 20, 30, 40)]


def test_a_file_that_was_cut_short_counts_as_far_as_it_goes(tmp_path):
    write(tmp_path, progress_at(10), progress_at(20))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, progress_at(20, loss=3.0), progress_at(30))
    counted = Counter((step, tag) for step, tag, _ in read_by_tensorboard(tmp_path) if tag == "loss")
    assert counted == {(10, "loss"): 1, (20, "loss"): 1, (30, "loss"): 1}


def test_without_tensorboard_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(RecipeError, match=r"expected tensorboard beside torch, found .* `pip install tensorboard`"):
        EventFiles(tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_before_the_first_step(tmp_path):
    EventFiles(tmp_path / "events").close()
    assert not (tmp_path / "events").exists()
