"""The door between Dagster and the device: what it hands out of a sealed artifact, and every setting that it refuses."""

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
import tiny_artifacts

from pipeline_assets.launch import TrainingOverrides
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.training import _settings
from training_io import gpu_io_manager
from training_io.errors import FormatError, RecipeError
from training_io.gpu_io_manager import DeviceInput, GpuIOManager, absent_device, device_type, may_have_gpu, why_cpu
from training_io.manifest import load_manifest, open_artifact
from training_io.stream import StreamSpec, open_stream

ROOT = Path(__file__).resolve().parent.parent
NO_DRIVER = pytest.mark.skipif(may_have_gpu(), reason="this machine has a GPU driver")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a finder knows of a sealed artifact."""

    asset: str
    identity: str
    digest: str
    lineage: dict[str, str]


class FolderFinder(dg.ConfigurableIOManager):
    """Finds an asset's one artifact in a folder, verified as the store verifies it."""

    root: str

    def handle_output(self, context, obj):
        raise AssertionError(context)

    def load_input(self, context):
        raise AssertionError(context)

    def find(self, context):
        (folder,) = (Path(self.root) / context.asset_key.path[-1] / "-").iterdir()
        manifest = open_artifact(folder)
        reference = Reference(
            asset=manifest.asset, identity=manifest.identity, digest=manifest.digest, lineage=dict(manifest.inputs)
        )
        return reference, folder


@pytest.fixture
def root(tmp_path):
    shards = tiny_artifacts.make_token_shards(tmp_path, {"train": tiny_artifacts.address_docs([5, 30, 9, 14])})
    tiny_artifacts.make_plan(tmp_path, shards)
    return tmp_path


def load(root, asset="packing_plan", **settings):
    manager = GpuIOManager(references=FolderFinder(root=str(root)), **settings)
    with dg.build_input_context(asset_key=asset) as context:
        return manager.load_input(context)


@pytest.mark.parametrize("asset", ["packing_plan", "token_shards"])
def test_an_input_is_a_description_of_the_sealed_artifact(root, asset):
    found = load(root, asset, device="cpu", dtype="bfloat16", prefetch_depth=5)
    (folder,) = (root / asset / "-").iterdir()
    manifest = load_manifest(folder)
    assert found == DeviceInput(
        asset=asset,
        identity=manifest.identity,
        digest=manifest.digest,
        lineage=manifest.inputs,
        folder=folder,
        device="cpu",
        dtype="bfloat16",
        prefetch_depth=5,
    )
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_description_opens_the_stream_in_another_process_too(root):
    found = pickle.loads(pickle.dumps(load(root, device="cpu")))
    spec = StreamSpec(plan_path=str(found.folder), device=found.device, prefetch_depth=found.prefetch_depth)
    step = next(open_stream(spec))
    assert sum(len(batch.inputs) for batch in step) == step[0].step_targets > 0
    assert {batch.inputs.device.type for batch in step} == {"cpu"}


def test_the_defaults_leave_the_device_to_the_machine_and_the_dtype_to_the_recipe(root):
    found = load(root)
    assert (found.device, found.dtype, found.prefetch_depth) == ("auto", "auto", 3)


@pytest.mark.parametrize(
    ("chosen", "recipes", "expected"),
    [
        ("auto", "auto", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_a_dtype_of_the_resource_replaces_the_recipes_and_is_what_the_run_is_known_by(root, chosen, recipes, expected):
    recipe = load_recipe("sample")
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"dtype": recipes})})
    settings = _settings(SimpleNamespace(recipe=recipe), load(root, device="cpu", dtype=chosen), TrainingOverrides())
    assert settings["dtype"] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device": "gpu"},
            r"resources.gpu_io_manager.config.device: expected auto, cpu, cuda or cuda:<number>, found 'gpu'",
        ),
        ({"device": "cuda:x"}, r"resources.gpu_io_manager.config.device: .* found 'cuda:x'"),
        ({"device": "cuda:"}, r"resources.gpu_io_manager.config.device: .* found 'cuda:'"),
        ({"device": "cuda:٣"}, r"resources.gpu_io_manager.config.device: .* found 'cuda:٣'"),
        ({"device": "cuda:" + "1" * 30}, r"resources.gpu_io_manager.config.device: .* found 'cuda:1{30}'"),
        ({"device": "cpu:0"}, r"resources.gpu_io_manager.config.device: .* found 'cpu:0'"),
        ({"device": ""}, r"resources.gpu_io_manager.config.device: .* found ''"),
        ({"device": "cuda:99"}, r"device cuda:99: expected a CUDA device, found \d"),
        (
            {"dtype": "float16"},
            r"resources.gpu_io_manager.config.dtype: expected one of auto, float32, bfloat16, found 'float16'",
        ),
        ({"dtype": "float64"}, r"resources.gpu_io_manager.config.dtype: .* found 'float64'"),
        ({"prefetch_depth": 0}, r"resources.gpu_io_manager.config.prefetch_depth: expected 1 to 16 steps, found 0"),
        ({"prefetch_depth": 17}, r"resources.gpu_io_manager.config.prefetch_depth: expected 1 to 16 steps, found 17"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(root, settings, message):
    with pytest.raises(dg.Failure, match=f"RecipeError: {message}") as refused:
        load(root, **settings)
    assert isinstance(refused.value.__cause__, RecipeError)
    assert not refused.value.allow_retries


@pytest.mark.parametrize("depth", [1, 16])
def test_the_limits_of_prefetching_are_possible(root, depth):
    assert load(root, prefetch_depth=depth).prefetch_depth == depth


def test_settings_of_another_kind_are_refused_when_the_resource_is_made(root):
    with pytest.raises(ValueError, match="prefetch_depth"):
        load(root, prefetch_depth="deep")


def test_an_artifact_that_is_not_sealed_is_no_input(root):
    (folder,) = (root / "packing_plan" / "-").iterdir()
    (folder / "manifest.json").unlink()
    with pytest.raises(FormatError, match=r"manifest\.json"):
        load(root)


def test_nothing_is_written_through_it(root):
    manager = GpuIOManager(references=FolderFinder(root=str(root)))
    with pytest.raises(dg.DagsterInvariantViolationError, match="give model another io_manager_key"):
        manager.handle_output(dg.build_output_context(asset_key="model"), 1)


def test_a_chosen_cpu_says_so_in_the_log(root, capsys):
    load(root, device="cpu")
    assert "gpu_io_manager: training on the CPU, since device is cpu." in capsys.readouterr().err


@NO_DRIVER
def test_where_there_is_no_gpu_the_log_says_so(root, capsys):
    assert device_type("auto") == "cpu"
    load(root)
    assert "training on the CPU: no GPU driver was found on this machine." in capsys.readouterr().err


def test_a_driver_without_a_device_is_another_reason(monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(gpu_io_manager.ctypes, "CDLL", lambda name: None)  # a driver's library is found
    assert why_cpu("auto") == "training on the CPU: a GPU driver was found, but torch sees no device that it can use."


def no_library(name):
    raise OSError(name)


@pytest.mark.parametrize(
    ("library", "num_gpus", "refused"),
    [
        (lambda name: None, 2, ["cuda:2", "cuda:10"]),
        (lambda name: None, 0, ["cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:10"]),
        (lambda name: None, None, []),  # a driver that lists none, as AMD's: only torch knows
    ],
)
def test_a_gpu_is_said_to_be_absent_only_where_the_driver_lists_fewer(
    library, num_gpus, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_io_manager.ctypes, "CDLL", library)
    monkeypatch.setattr(gpu_io_manager, "GPUS_OF_THE_DRIVER", tmp_path / "gpus")
    for number in range(num_gpus or 0):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    if num_gpus == 0:
        (tmp_path / "gpus").mkdir()
    devices = ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:10"]
    assert [device for device in devices if absent_device(device, "")] == refused


def test_a_list_of_gpus_that_may_not_be_read_refuses_none(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_io_manager.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(gpu_io_manager, "GPUS_OF_THE_DRIVER", tmp_path)
    assert absent_device("cuda", "")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert absent_device("cuda", "") == []


def test_without_a_driver_no_gpu_is_here(monkeypatch):
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has an AMD driver")
    monkeypatch.setattr(gpu_io_manager.ctypes, "CDLL", no_library)
    assert [bool(absent_device(device, "")) for device in ("auto", "cpu", "cuda", "cuda:0")] == [False] * 2 + [True] * 2


def test_the_code_location_loads_it_without_torch():
    code = "import sys, training_io.gpu_io_manager; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_dagster_hands_the_description_to_the_asset_below(root):
    """As an asset's input manager, with the settings in the run's configuration."""
    handed = []

    @dg.asset(ins={"packing_plan": dg.AssetIn(input_manager_key="gpu")})
    def trained(packing_plan) -> None:
        handed.append(packing_plan)

    definitions = dg.Definitions(
        assets=[dg.AssetSpec("packing_plan"), trained],
        resources={"gpu": GpuIOManager.configure_at_launch(references=FolderFinder(root=str(root)))},
    )
    job = definitions.resolve_implicit_global_asset_job_def()
    config = {"device": "cpu", "dtype": "float32", "prefetch_depth": 2}
    result = job.execute_in_process(
        run_config={"resources": {"gpu": {"config": config}}}, asset_selection=[dg.AssetKey("trained")]
    )
    assert result.success
    assert handed == [load(root, **config)]
    config = {**config, "device": "tpu"}
    failed = job.execute_in_process(
        run_config={"resources": {"gpu": {"config": config}}},
        asset_selection=[dg.AssetKey("trained")],
        raise_on_error=False,
    )
    (failure,) = failed.get_step_failure_events()
    description = failure.step_failure_data.user_failure_data.description
    assert description.startswith("RecipeError: resources.gpu_io_manager.config.device: expected auto, cpu")
    assert len(handed) == 1
