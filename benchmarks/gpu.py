"""Attention backends side by side on a GPU: `python benchmarks/gpu.py [--output FILE]`, or `make bench-gpu`.

varlen and FlexAttention train the 124m preset on packs of 4,096 tokens through the GPU IO manager's stream, in constant
shapes. SDPA trains the same model on the same documents in rows padded to 4,096, as many rows as the others have packs.
All compute in bfloat16 over float32 weights and take train's step: gradients, clipping, AdamW, one wait. The loop, the
optimizer and the stream are training_io's own.

Before anything is timed, verdicts on parity and isolation are settled (gpu_verdicts.py). What the report says of each
contender: real tokens a second (padding and slack do not count); model FLOPs utilisation, of the real tokens with the
causal half of attention; how many graphs torch.compile made; idle_percent, the share of the time that lies between the
end of one step's work on the device and the beginning of the next one's. resident_idle_percent is the same with the
batches on the device from the start: what is left without an IO manager. Gaps inside a step are not seen.

It ends within --seconds (480) by its own clock, with what it has. The exit status is 0 when it finished and no verdict
failed; bars are reported and do not change it. Without a GPU nothing is measured: exit status 1.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_verdicts import Verdict, verdicts_of
from packing import BUFFER, web_lengths
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from training_io.attention import BACKENDS
from training_io.batch import assemble_batch, in_padded_rows
from training_io.document_index import cut_shards, index_of
from training_io.flops import peak_flops, step_flops
from training_io.model import Model, ModelConfig, num_parameters, preset
from training_io.model_presets import MODEL_PRESETS
from training_io.plan import Plan, ShardsReference
from training_io.planning import plan_packs
from training_io.preflight import first_loss_of
from training_io.shard_format import write_shard
from training_io.staging import DeviceBatch, HostBatch, stage_for
from training_io.stopping import Noted
from training_io.stream import StreamSpec, open_packs
from training_io.train import make_optimizer, queue_update
from training_io.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent

DTYPE = torch.bfloat16
PREFETCH_DEPTH = 3
NUM_WARM_UPS = 3
NUM_RESIDENT = 4
EOS_ID = 0
LOSS_LIMIT = 0.02  # nats between backends on one batch, in bfloat16, and a fiftieth of what a leak would give
CONFIG = TrainConfig(steps=1, learning_rate=6e-4)

Step = list[DeviceBatch]


class OutOfTimeError(Exception):
    """The clock that ends a run within its time."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; the defaults of the command line are those of the project's bars."""

    device: str
    preset: str
    vocab_size: int
    context: int
    rows: int
    documents: int
    backends: tuple[str, ...]
    compile: bool
    max_steps: int
    seconds: float

    @property
    def model(self) -> ModelConfig:
        """The model that all contenders train."""
        return preset(self.preset, self.vocab_size, self.context)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A run of steps: wall-clock seconds, those during which the device had a step's work, and what was done."""

    steps: int
    seconds: float
    busy_seconds: float
    real_tokens: int
    computed_tokens: int
    flops: int

    @property
    def idle_percent(self) -> float:
        """Share of the time between steps."""
        return 100 * max(0.0, 1 - self.busy_seconds / self.seconds)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train: an attention backend, and steps from a stream or from the device's own memory."""

    name: str
    backend: str
    next_step: Callable[[], Step]
    stage_ahead: Callable[[], None]
    resident: (
        Callable[[], Step] | None
    )  # the same kind of steps without an IO manager; None where they are that already


@dataclass(kw_only=True)
class Report:
    """What has been found so far."""

    verdicts: list[Verdict] = field(default_factory=list)
    contenders: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the report, print its lines."""
    settings, output = _parse(arguments)
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA device, found none; nothing was measured.", file=sys.stderr)
        return 1
    started, clock = time.gmtime(), time.perf_counter()
    report = Report()
    try:
        with _ended_after(settings.seconds), tempfile.TemporaryDirectory() as scratch, rows_backend():
            measure(settings, Path(scratch), report, clock + settings.seconds)
        report.finished = True
    except OutOfTimeError:
        print(f"benchmarks/gpu.py: {settings.seconds:g} s are over; the report has what was done.", file=sys.stderr)
    answer = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", started),
        "seconds": time.perf_counter() - clock,
        "finished": report.finished,
        "machine": machine_facts(torch.device(settings.device)),
        "settings": asdict(settings),
        "parameters": num_parameters(settings.model),
        "verdicts": [{**asdict(verdict), "passed": verdict.passed} for verdict in report.verdicts],
        "contenders": report.contenders,
        "bars": bars_of(report.contenders, settings.compile),
    }
    output = output or ROOT / "bench-results" / time.strftime("gpu-%Y%m%d-%H%M%S.json", started)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*lines_of(answer), "", str(output)]))
    return 0 if report.finished and all(verdict.passed for verdict in report.verdicts) else 1


def measure(settings: Settings, scratch: Path, report: Report, deadline: float) -> None:
    """Verdicts first, then one contender after another, each with an equal part of the time that is left."""
    device = torch.device(settings.device)
    report.verdicts += verdicts_of(settings.backends, device, DTYPE)
    plan = make_plan(scratch, settings)
    contenders = [packed_contender(backend, plan, settings) for backend in settings.backends]
    contenders.append(padded_contender(plan, settings))
    first_losses = {}
    for number, contender in enumerate(contenders):
        left = deadline - time.perf_counter()
        until = time.perf_counter() + left / (len(contenders) - number)
        print(f"measuring {contender.name}", file=sys.stderr)
        figures, first_losses[contender.name] = measure_contender(contender, settings, until)
        report.contenders.append(figures)
    report.verdicts += loss_verdicts(first_losses, settings)


def measure_contender(contender: Contender, settings: Settings, until: float) -> tuple[dict[str, Any], float]:
    """Compile and warm up, then steps from the stream, then as many with the batches on the device already."""
    device = torch.device(settings.device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = Model(settings.model, torch.Generator().manual_seed(0), backend=contender.backend).to(device)
    module: nn.Module = torch.compile(model, fullgraph=True, dynamic=False) if settings.compile else model
    take = Steps(module=module, optimizer=make_optimizer(model, CONFIG), config=settings.model, device=device)
    began = time.perf_counter()
    losses = take.warm_up(contender)
    warm_up_seconds = time.perf_counter() - began
    half = time.perf_counter() + (until - time.perf_counter()) / 2
    timing = take.timed(contender.next_step, contender.stage_ahead, settings.max_steps, half)
    resident = timing
    if contender.resident is not None:
        resident = take.timed(contender.resident, lambda: None, settings.max_steps, until)
    peak = peak_flops(device_name(device), "bfloat16")
    figures = {
        "name": contender.name,
        "backend": contender.backend,
        "steps": timing.steps,
        "seconds": timing.seconds,
        "warm_up_seconds": warm_up_seconds,
        "real_tokens": timing.real_tokens,
        "computed_tokens": timing.computed_tokens,
        "real_tokens_per_second": timing.real_tokens / timing.seconds,
        "mfu": None if peak is None else timing.flops / timing.seconds / peak,
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        "idle_percent": timing.idle_percent,
        "resident_idle_percent": resident.idle_percent,
        "resident_real_tokens_per_second": resident.real_tokens / resident.seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "first_loss": losses[0],
    }
    return figures, losses[0]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A model and its optimizer, to take steps with."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    config: ModelConfig
    device: torch.device

    def warm_up(self, contender: Contender) -> list[float]:
        """A few steps of the contender, untimed; returns their losses."""
        return [self._take(contender.next_step(), contender.stage_ahead)[0] for _ in range(NUM_WARM_UPS)]

    def timed(
        self, next_step: Callable[[], Step], stage_ahead: Callable[[], None], max_steps: int, until: float
    ) -> Timing:
        """Steps until there are max_steps or the time is over, one at least."""
        marks: list[tuple[Any, Any]] = []
        counts = np.zeros(4, dtype=np.int64)
        started = time.perf_counter()
        while len(marks) < max_steps and (not marks or time.perf_counter() < until):
            microbatches = next_step()
            counts += np.sum([counts_of(batch) for batch in microbatches], axis=0)
            marks.append(self._take(microbatches, stage_ahead)[1:])
        seconds = time.perf_counter() - started
        computed_tokens, num_inputs, num_targets, sum_squares = counts.tolist()
        return Timing(
            steps=len(marks),
            seconds=seconds,
            busy_seconds=sum(seconds_between(began, ended) for began, ended in marks),
            real_tokens=num_targets,
            computed_tokens=computed_tokens,
            flops=step_flops(self.config, num_inputs, sum_squares),
        )

    def _take(self, microbatches: Step, stage_ahead: Callable[[], None]) -> tuple[float, Any, Any]:
        """One step by train's own update: its loss, and the moments when the device began and ended it."""
        began = moment(self.device)
        queued = queue_update(self.module, self.optimizer, microbatches, DTYPE, CONFIG.grad_clip, Noted())
        ended = moment(self.device)
        stage_ahead()
        loss: float = queued.tolist()[0]  # the one wait
        return loss, began, ended


def counts_of(batch: DeviceBatch) -> tuple[int, int, int, int]:
    """Tokens computed, inputs, targets and summed squares of a microbatch."""
    return len(batch.inputs), batch.num_inputs, batch.num_targets, batch.sum_squares


def moment(device: torch.device) -> Any:
    """Now, as the device will reach it: a CUDA event, or the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Seconds from one moment to another that has passed."""
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1_000)


def make_plan(scratch: Path, settings: Settings) -> Plan:
    """A plan over a shard of documents of random tokens, of web-like lengths cut to the context."""
    lengths = np.minimum(web_lengths(settings.documents), settings.context + 1)  # the last token is only a target
    index = index_of(
        split="train",
        doc_ids=np.zeros((len(lengths), 32), dtype=np.uint8),
        pools=np.zeros(len(lengths), dtype=np.uint16),
        pool_names=("web",),
        lengths=lengths,
        cuts=cut_shards(lengths, int(lengths.sum())),
        eos_id=EOS_ID,
        token_dtype="uint16" if settings.vocab_size <= 2**16 else "uint32",
        tokenizer_fingerprint="",
    )
    tokens = np.random.default_rng(0).integers(1, settings.vocab_size, index.num_tokens)
    tokens[np.cumsum(lengths) - 1] = EOS_ID
    write_shard(scratch / index.shard_files[0], tokens.astype(index.token_dtype))
    return plan_packs(
        index,
        shards=ShardsReference(path=scratch, identity="", digest=""),
        max_seq_len=settings.context,
        capacity=settings.context,
        strategy="oldest_first",
        buffer=BUFFER,
        packs_per_microbatch=settings.rows,
        microbatches_per_step=1,
        epoch_seed=1,
    )


def packed_contender(backend: str, plan: Plan, settings: Settings) -> Contender:
    """Packs in constant shapes through the stream that the GPU IO manager opens."""
    spec = StreamSpec(
        plan_path="",
        device=settings.device,
        prefetch_depth=PREFETCH_DEPTH,
        vocab_size=settings.vocab_size,
        constant_shape=True,
    )
    stream, kept = open_packs(plan, spec), open_packs(plan, spec)
    resident = cycle([next(kept) for _ in range(NUM_RESIDENT)])
    return Contender(
        name=f"{backend}, packed",
        backend=backend,
        next_step=lambda: next(stream),
        stage_ahead=stream.stage_ahead,
        resident=lambda: next(resident),
    )


def padded_contender(plan: Plan, settings: Settings) -> Contender:
    """The same documents in order, one a row of the context's length, on the device from the start."""
    stage = stage_for(torch.device(settings.device), plan.index.token_dtype)
    batches = [stage(padded_batch(plan, settings.rows, number))() for number in range(NUM_RESIDENT)]
    resident = cycle([[batch] for batch in batches])
    return Contender(
        name="sdpa, padded",
        backend="rows",
        next_step=lambda: next(resident),
        stage_ahead=lambda: None,
        resident=None,
    )


def padded_batch(plan: Plan, rows: int, number: int) -> HostBatch:
    """Documents [number · rows, (number + 1) · rows) of the split, padded on the right with inputs 0 and IGNORED."""
    documents = np.arange(number * rows, (number + 1) * rows)
    lengths = plan.index.lengths[documents].astype(np.int64) - 1
    flat = assemble_batch(
        plan.index,
        plan.token_shards,
        documents,
        np.zeros_like(documents),
        lengths,
        step_targets=int(lengths.sum()),
        epoch=0,
        step=number,
    )
    padded = in_padded_rows(flat, plan.max_seq_len)
    return HostBatch(packed=padded, num_inputs=len(flat.inputs), num_eos=rows, sum_squares=int(lengths @ lengths))


def attend_rows(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Causal attention in rows of max_seqlen tokens, one call for all: what padded training does."""
    q_BNLH, k_BNLH, v_BNLH = (x.unflatten(0, (-1, max_seqlen)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
    is_grouped = q_TNH.shape[1] != k_TNH.shape[1]
    out_BNLH = scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, is_causal=True, enable_gqa=is_grouped)
    return out_BNLH.transpose(1, 2).flatten(0, 1)


@contextmanager
def rows_backend() -> Iterator[None]:
    """attend_rows as an attention backend of the model, here alone: training has segments, not rows."""
    BACKENDS["rows"] = attend_rows
    try:
        yield
    finally:
        del BACKENDS["rows"]


def loss_verdicts(first_losses: dict[str, float], settings: Settings) -> list[Verdict]:
    """A fresh model guesses, whatever the backend; on the same packs two backends lose the same."""
    expected = first_loss_of(settings.model)
    verdicts = [
        Verdict(name="first loss, from that of guessing", backend=name, found=abs(loss - expected), limit=0.1)
        for name, loss in first_losses.items()
    ]
    packed = [loss for name, loss in first_losses.items() if name.endswith("packed")]
    spread = max(packed) - min(packed)
    return [*verdicts, Verdict(name="first losses apart", backend="packed", found=spread, limit=LOSS_LIMIT)]


def bars_of(contenders: Sequence[dict[str, Any]], is_compiled: bool) -> list[dict[str, Any]]:
    """The project's limits: `met` is None where a figure could not be had."""
    by_backend = {figures["backend"]: figures for figures in contenders}
    limits: list[tuple[str, str, str, float]] = [
        ("varlen", "mfu", "at_least", 0.45),
        ("varlen", "idle_percent", "at_most", 2.0),
    ]
    limits += [(backend, "graphs", "at_most", 1) for backend in by_backend if is_compiled]
    return [
        _bar(by_backend.get(backend, {}).get(name), backend, name, kind, limit) for backend, name, kind, limit in limits
    ]


def _bar(found: float | None, backend: str, name: str, kind: str, limit: float) -> dict[str, Any]:
    met = None if found is None else (found >= limit if kind == "at_least" else found <= limit)
    return {"backend": backend, "figure": name, kind: limit, "found": found, "met": met}


def lines_of(answer: dict[str, Any]) -> list[str]:
    """The report as text: contenders, verdicts that failed, bars."""
    lines = [f"{answer['machine']['device']}: {answer['parameters']:,} parameters"]
    for figures in answer["contenders"]:
        mfu = "unknown" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
        lines.append(
            f"{figures['name']}: {figures['real_tokens_per_second']:,.0f} real tokens/s, MFU {mfu},"
            f" {figures['graphs']} graphs, idle {figures['idle_percent']:.2f} %"
            f" (resident {figures['resident_idle_percent']:.2f} %)"
        )
    failed = [verdict for verdict in answer["verdicts"] if not verdict["passed"]]
    lines += [f"FAILED {v['name']}, {v['backend']}: {v['found']:g}, at most {v['limit']:g}" for v in failed]
    lines += [f"{bar['backend']} {bar['figure']}: {BAR_WORDS[bar['met']]}" for bar in answer["bars"]]
    return [*lines, f"verdicts: {len(answer['verdicts']) - len(failed)} of {len(answer['verdicts'])} passed"]


BAR_WORDS = {True: "bar met", False: "bar NOT met", None: "bar not measured"}


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    is_cuda = device.type == "cuda"
    return {
        "device": device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)) if is_cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def device_name(device: torch.device) -> str:
    """What the driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _parse(arguments: Sequence[str] | None) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description="Attention backends side by side on a GPU.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:<number>, or cpu to try the script out (cuda)")
    parser.add_argument("--preset", choices=MODEL_PRESETS, default="124m", help="the model's shape (124m)")
    parser.add_argument("--vocab-size", type=int, default=50_304, help="GPT-2's, rounded up to 64 (50,304)")
    parser.add_argument(
        "--context", type=int, default=4_096, help="tokens of a pack or row, and longest segment (4,096)"
    )
    parser.add_argument("--rows", type=int, default=8, help="packs or rows of a step (8)")
    parser.add_argument("--documents", type=int, default=4_000, help="documents to train on (4,000)")
    parser.add_argument(
        "--backends", nargs="+", choices=("varlen", "flex"), default=("varlen", "flex"), help="of packs"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--max-steps", type=int, default=100, help="steps of a timed run at most (100)")
    parser.add_argument("--seconds", type=float, default=480, help="when to end at the latest (480)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report (bench-results/gpu-<time>.json)")
    parsed = parser.parse_args(arguments)
    for name in ("rows", "max_steps", "seconds"):
        if getattr(parsed, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0, found {getattr(parsed, name)}")
    if parsed.documents < NUM_RESIDENT * parsed.rows:
        parser.error(f"--documents: expected {NUM_RESIDENT} steps of rows or more, found {parsed.documents:,}")
    settings = Settings(
        device=parsed.device,
        preset=parsed.preset,
        vocab_size=parsed.vocab_size,
        context=parsed.context,
        rows=parsed.rows,
        documents=parsed.documents,
        backends=tuple(parsed.backends),
        compile=not parsed.eager,
        max_steps=parsed.max_steps,
        seconds=parsed.seconds,
    )
    return settings, parsed.output


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """OutOfTimeError in the main thread once the seconds are over, whatever it does then."""

    def end(number: int, frame: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
