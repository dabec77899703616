"""The command line. Heavy imports happen inside the verbs, so that `--help` is quick and `env` works where torch does not."""
from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from .observe.report import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Mixture-of-Experts inference without waiting for experts or for the KV cache.")


def _version(asked: bool) -> None:
    if asked:
        from . import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _about(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                 help="Print the version; `env` prints those of all that matters.")] = False) -> None:
    pass


# Into a file or a pipe tables are as wide as they need; a terminal says how wide it is. A daemon may have closed it: then it is None.
out, err = Console(width=None if sys.stdout and sys.stdout.isatty() else 132), Console(stderr=True)


# Packages that a plain install leaves out, and the extra that brings each.
EXTRAS = {"transformers": "hf", "accelerate": "hf", "gguf": "hf", "huggingface_hub": "hf", "matplotlib": "report", "triton": "triton",
          "prometheus_client": "metrics", "deepspeed": "deepspeed", "megatron": "megatron"}


@contextmanager
def _errors() -> Iterator[None]:
    """Our errors, and the system's about files, in one paragraph and exit code 1; an interrupt is 130."""
    from .errors import MoEPrefetchError

    def terminate(*_: object) -> None:
        raise KeyboardInterrupt

    # Asked to end, we end as after Ctrl-C: temporary files go.
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except MoEPrefetchError as e:
        err.print(f"error: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from e
    except ModuleNotFoundError as e:
        if (extra := EXTRAS.get(package := (e.name or "").partition(".")[0])) is None:
            raise
        err.print(f"error: {package} is not installed. What to do: pip install 'moe_prefetch[{extra}]', in a checkout '.[{extra}]'.",
                  style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from e
    except BrokenPipeError:
        raise
    except OSError as e:
        if e.filename is None:
            raise
        err.print(f"error: {e.strerror} [{e.filename}]. What to do: check the path, its permissions and the room on its disk.", style="red",
                  markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from e
    except KeyboardInterrupt:
        err.print("interrupted: the model is as it was and temporary files are gone; what was recorded or checkpointed before stays",
                  style="yellow", soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere one line per stage, so that a log stays readable."""
    if not err.is_terminal:
        last = [""]

        def say(what: str, done: int, total: int) -> None:
            if what != last[0]:
                last[0] = what
                err.print(f"[{done}/{total}] {what}", markup=False, highlight=False)

        yield say
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _print(table: Table) -> None:
    # Title and note beside the table, not within it: they would be as narrow.
    rich = RichTable(padding=(0, 1, 0, 0))
    for i, column in enumerate(table.columns):
        numeric = bool(table.rows) and not isinstance(table.rows[0][i], str)
        rich.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in table.text():
        rich.add_row(*row)
    out.print(table.title, style="table.title", markup=False, highlight=False)
    out.print(rich, markup=False)
    if table.note:
        out.print(table.note, style="table.caption", markup=False, highlight=False)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the report (Markdown, PNG, JSON).")] = Path("demo-report"),
    tokens: Annotated[int, typer.Option(min=8, max=512, help="New tokens for each of the three prompts.")] = 48,
    real_drive: Annotated[bool, typer.Option("--real-drive", help="Do not model a drive on top of the real reads.")] = False,
    probe: Annotated[Path | None, typer.Option(help="A fitted probe for SmolMoE in place of the one that comes along.")] = None,
) -> None:
    """Generate with 50 % and 25 % of the experts resident under every plan, check that tokens are identical, and measure KV formats.

    Runs SmolMoE, a real MoE model, on the CPU. Takes a few minutes and about 3 GB of memory.
    """
    from . import demo as job

    with _errors():
        with _progress() as progress:
            report = job.run(folder, new_tokens=tokens, drive=None if real_drive else job.DRIVE, probe=probe, progress=progress)
        for table in report.tables:
            _print(table)
        out.print("tokens identical for every plan: yes", style="green", highlight=False)
        out.print(f"report: {folder / 'report.md'}", highlight=False)


@app.command()
def env() -> None:
    """Print versions, devices and settings for a bug report. Works where torch does not."""
    from .observe.env import collect

    print(collect())


@app.command()
def validate(config: Annotated[Path, typer.Argument(help="A YAML config, or a DeepSpeed JSON with a moe_prefetch section.")]) -> None:
    """Check a configuration and list every problem. Touches no model and no GPU; exit code 1 when there is a problem."""
    from .validate import check

    problems = check(config)
    for problem in problems:
        err.print(f"- {problem}", markup=False, highlight=False, soft_wrap=True)
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        err.print(f"{config}: {count}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    out.print(f"{config}: no problems", style="green", markup=False, highlight=False)


Model = Annotated[str, typer.Option(help="smolmoe, or a folder with a transformers checkpoint of a supported family.")]


@app.command()
def trace(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the trace. Called again on it with the same text, it goes on.")],
    model: Model = "smolmoe",
    text: Annotated[list[Path] | None, typer.Option(help="Text file; may be given several times. Default: Python's documentation.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most this many tokens, in whole windows of 512.")] = None,
    cap_mb: Annotated[float, typer.Option(min=1, help="Stop at this many megabytes.")] = 1024.0,
) -> None:
    """Record hidden states and router decisions of a model on text: what `fit` learns from."""
    from .probes import jobs

    with _errors(), _progress() as progress:
        found = jobs.run_trace(model, folder, texts=text or (), cap_mb=cap_mb, tokens=tokens,
                               progress=lambda done, total: progress("recording", done, total))
    out.print(f"{folder}: {sum(s['tokens'] for s in found.manifest['shards']):,} tokens in {len(found)} shards", highlight=False)


@app.command()
def fit(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the probe. An interrupted fit goes on from its last checkpoint.")],
    model: Model = "smolmoe",
    traces: Annotated[list[Path] | None, typer.Option("--trace", help="Trace folder, one a domain; may be given several times.")] = None,
    held_out: Annotated[list[Path] | None, typer.Option(help="Trace that is only judged on. Default: the end of every trace.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Record a little of Python's documentation and fit on it, in minutes.")] = False,
    past: Annotated[bool, typer.Option("--past", help="Horizon 0 also sees the tokens before: better there, twice its size.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write a probe that is below the stale gate on a held-out domain, too.")] = False,
) -> None:
    """Fit routing probes and write them with a card of figures. Refuses one that is worse than the unfitted gate on any held-out domain."""
    from .probes import jobs

    with _errors():
        with _progress() as progress:
            stage = ["starting"]
            jobs.run_fit(model, folder, traces=traces or (), held_out=held_out or (), quick=quick, past=past, force=force,
                         stage=lambda text: stage.__setitem__(0, text), progress=lambda done, total: progress(stage[0], done, total))
        if jobs.first_rank():
            out.print((folder / "README.md").read_text(), markup=False, highlight=False)
            out.print(f"probe: {folder}   (probe: {{path: {folder}}} in a config)", markup=False, highlight=False)


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure what the library does, next to what people use today.")
app.add_typer(bench, name="bench")


@bench.command("kv-quality")
def bench_kv_quality(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the report: table, figures, figures as JSON.")],
    text: Annotated[Path | None, typer.Option(help="Plain text: its start is measured, its end calibrates. Default: Python's documentation."
                                              )] = None,
    model: Annotated[str, typer.Option(help="smollm2, smolmoe, or a folder with a transformers checkpoint.")] = "smollm2",
    texts: Annotated[int, typer.Option(min=1, help="How many stretches of text; 24 make a figure worth quoting.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens in each.")] = 2048,
    only: Annotated[str, typer.Option(help="Schemes, with commas between, such as fp4-quality_w128; `all`: every one we know.")] = "",
    passkey: Annotated[int, typer.Option(min=0, help="Instead: hide this many keys in --length tokens each and look for them.")] = 0,
    journal: Annotated[list[Path] | None, typer.Option(help="File that keeps each measurement as it comes; a run that stopped goes on from "
                                                       "it. Given several times: all are read, the first is written.")] = None,
    rows: Annotated[Path | None, typer.Option(help="CSV to append rows to, as in benchmarks/results.")] = None,
    commit: Annotated[str, typer.Option(help="Commit to name in the rows.")] = "",
) -> None:
    """What each KV cache format does to a model's answers: logit KL, perplexity, bits per element with everything counted.

    A scheme is a format (fp16, fp8, fp4-72, fp4-quality, nvfp4, mxfp4, or two as K+V: fp8+fp4-72), then what differs from the default:
    _topn, _sigma or _none (how the FP16 channels are chosen), _nowindow or _w128 (recent tokens in FP16; fp4-quality keeps 1,024, the
    others 64), _s32 (tokens leave the window 32 at a time, as in generation; else at once), _pinned (an MoE model keeps the exact run's
    routing), in this order; --passkey always has them leave as in generation. Beside them stand peer-fp8-cast and the quantisers of
    transformers' QuantizedCache, peer-quanto-int4-k1v0, peer-quanto-int4-k0v0, peer-hqq4-g64 and peer-hqq4-g32, where optimum-quanto and
    hqq are installed. A model of 135 million parameters takes about 12 seconds a scheme for 2,048 tokens on two CPU cores, a fraction of
    a second on a GPU. Results: docs/kv.md.
    """
    import torch

    from .bench import kv_quality as job
    from .bench.rows import Journal, append_rows, check_rows, machine_name
    from .observe.report import check_folder
    from .probes.jobs import builtin_texts, read_texts

    if rows in (journal or ()):
        raise typer.BadParameter("--rows is also --journal; name two files")
    with _errors():
        schemes = job.EVERY if only == "all" else tuple(s.strip() for s in only.split(",")) if only else job.SHORT
        device = "cuda" if torch.cuda.is_available() else "cpu"
        words = (read_texts([text]) if text else builtin_texts())[0]
        wanted = job.Job(words, model, texts, length, schemes, passkey=passkey, device=device, together=4 if device == "cuda" else 1)
        check_folder(folder)
        if rows:
            check_rows(rows)
        kept = Journal(journal or ())
        with _progress() as progress:
            missing = job.run(wanted, kept, progress)
        report = job.report_of(wanted, kept, missing)
        for table in report.tables:
            _print(table)
        report.save(folder)
        if rows:
            append_rows(rows, "kv-quality", job.rows_of(wanted, kept), machine=machine_name(device), commit=commit, checked=job.CHECKED)
    out.print(f"report: {folder / 'report.md'}", highlight=False)


@bench.command("kv-attend", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench_kv_attend(
    context: typer.Context,
    file: Annotated[Path, typer.Option("--out", help="CSV of rows, as in benchmarks/results.")],
    cases: Annotated[str, typer.Option(help="Regular expression over names such as b8_g4_d128_t32768_o8.")] = ".",
    kinds: Annotated[str, typer.Option(help="o8: 8 outlier channels, o0: none, f72: what fp4-72 grants.")] = "o8,f72,o0",
    commit: Annotated[str, typer.Option(help="Commit to name in the rows.")] = "unknown",
) -> None:
    """Decode attention over FP4 pages beside the fastest of PyTorch in FP16: time, bytes, error. Needs a GPU. Results: docs/kernels.md."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("these figures need a GPU")
    from .bench import kv_attend as job

    argv = ["--out", str(file), "--cases", cases, "--kinds", kinds, "--commit", commit, *context.args]
    raise typer.Exit(job.main(argv, say=lambda *text, **_: out.print(*text, markup=False, highlight=False)))


@bench.command("expert-mlp", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench_expert_mlp(
    context: typer.Context,
    file: Annotated[Path, typer.Option("--out", help="CSV of rows, as in benchmarks/results.")],
    cases: Annotated[str, typer.Option(help="Regular expression over names such as qwen3-30b-a3b_t16, host, peer.")] = ".",
    commit: Annotated[str, typer.Option(help="Commit to name in the rows.")] = "unknown",
) -> None:
    """A MoE layer from expert records beside torch._grouped_mm, a loop over experts and a copy within HBM. Needs a GPU: docs/experts.md."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("these figures need a GPU")
    from .bench import expert_mlp as job

    argv = ["--out", str(file), "--cases", cases, "--commit", commit, *context.args]
    raise typer.Exit(job.main(argv, say=lambda *text, **_: out.print(*text, markup=False, highlight=False)))


@bench.command("dispatch")
def bench_dispatch(
    file: Annotated[Path, typer.Option("--out", help="CSV to append rows to, as in benchmarks/results.")],
    gpus: Annotated[int, typer.Option(min=0, help="Ranks, a GPU each. Default: all GPUs; on a CPU 2.")] = 0,
    cases: Annotated[str, typer.Option(help="Regular expression over names such as qwen3-30b-a3b_ep2_t4_uniform.")] = ".",
    slots: Annotated[int, typer.Option(min=0, help="Room for copies on each rank: skewed routings run again with them, as cases _rN.")] = 0,
    ids: Annotated[Path | None, typer.Option(help="Real routing of a top-6 model: .npz with expert_ids [tokens, layers, 6].")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="No case is begun later; cases that were not run are named.")] = 420.0,
    commit: Annotated[str, typer.Option(help="Commit to name in the rows.")] = "unknown",
    device: Annotated[str, typer.Option(help="cuda; or cpu: the same code with a small model, right or wrong, no figures.")] = "cuda",
) -> None:
    """A MoE layer over several GPUs, one-sided, beside NCCL's all-to-all and all-gather/reduce-scatter. Results: docs/dispatch.md."""
    from .bench import dispatch as job

    argv = ["--out", str(file), "--gpus", str(gpus), "--cases", cases, "--slots", str(slots), "--seconds", str(seconds), "--commit", commit,
            "--device", device]
    with _errors():
        code = job.main([*argv, *(["--ids", str(ids)] if ids else [])], say=lambda *text: out.print(*text, markup=False, highlight=False,
                                                                                                  soft_wrap=True))
    raise typer.Exit(code)


def main() -> None:
    """Entry point of `moe-prefetch`."""
    from .observe.env import collect, printing

    with printing():
        if sys.argv[1:] == ["env"]:
            # Straight to the point: a broken dependency is what this verb is asked about.
            print(collect(), flush=True)
            return
        app()


if __name__ == "__main__":
    sys.exit(main())
