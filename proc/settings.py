"""Every flag, once: the settings of a server as one dataclass, from which the command line is made. Knows no torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NoReturn

from runtime.device.launch import KINDS
from runtime.device.roofline import roofline

CALLS = ("auto", "hermes", "llama3", "mistral")


class UsageError(ValueError):
    """Settings that cannot be met; one line that names the flag."""


def flag(default: Any, words: str, *aliases: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": words, "aliases": aliases, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Of one server. Field names are the flags' names."""

    model: str = flag("smollm2", "smollm2, a folder, a .gguf file or a hub id", "--model-path")
    served_model_name: str | None = flag(None, "the name clients see (default: the model's)")
    procs: str = flag("3", "1, 2, 3, N > 3, or roles such as tokenizer=2,worker=1,http=2; worker: of each scheduler")
    tensor_parallel_size: int | None = flag(
        None,
        "workers that share each replica's model, as worker=N of --procs (default: 1); heads must divide; not with "
        "--quantization, --procs 1 or a simulated device",
        "--tp",
        "--tp-size",
    )
    cores: str | None = flag(
        None,
        "cores by role, such as worker=0-1,tokenizer=2 (default: any; a CPU worker's compute threads keep one each, "
        "which OMP_PROC_BIND=false undoes, and OMP_NUM_THREADS says how many)",
    )
    device: str = flag(
        "auto",
        "auto, cuda (one of CUDA_VISIBLE_DEVICES), cpu, sim, sim:NAME such as sim:h100-llama-3.1-8b, or sim:FILE.toml",
    )
    dtype: str = flag(
        "auto",
        "of weights and KV; auto: the checkpoint's, bfloat16 of a quantized one",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = flag(
        "none",
        "of linear layers on the CPU: codes made while loading, or a GGUF file's own (some kinds anew in int8)",
        choices=("none", "int8", "int4", "gguf"),
    )
    load_format: str = flag("auto", "dummy: random weights", choices=("auto", "safetensors", "gguf", "dummy"))
    revision: str | None = flag(None, "of a hub id: branch, tag or commit")
    chat_template: str | None = flag(None, "a file with a jinja2 template, instead of the model's")
    tool_call_parser: str = flag("auto", "how the model writes tool calls; auto: as its template says", choices=CALLS)
    reasoning_parser: str = flag(
        "auto", "whether <think> is told apart; auto: where the template has it", choices=("auto", "think", "none")
    )
    max_model_len: int | None = flag(None, "tokens of a request, prompt and output", "--context-length")
    max_num_seqs: int = flag(64, "rows of a step", "--max-running-requests")
    max_num_batched_tokens: int = flag(2048, "tokens of a step", "--chunked-prefill-size")
    max_num_queued_reqs: int | None = flag(
        None, "waiting requests before new ones are refused", "--max-queued-requests"
    )
    block_size: int = flag(16, "tokens of a KV page", "--page-size")
    num_blocks: int | None = flag(None, "KV pages, instead of a share of the memory")
    gpu_memory_utilization: float | None = flag(
        None,
        "share of a GPU's memory for all of this server (default: 0.9), on the CPU of the free memory for KV (0.3)",
        "--mem-fraction-static",
    )
    kv_cache_dtype: str = flag("auto", "of keys and values on a GPU; auto: the model's", choices=("auto", "fp8"))
    attention_backend: str = flag(
        "auto", "on a GPU; auto: flashinfer where it is installed, else torch", choices=("auto", "flashinfer", "torch")
    )
    enforce_eager: bool = flag(False, "no CUDA graphs (which the CPU never has)", "--disable-cuda-graph")
    token_table: str = flag(
        "auto", "how a GPU's next-token ids reach the scheduler; auto: cuda-ipc", choices=("auto", "cuda-ipc", "pinned")
    )
    disable_radix_cache: bool = flag(False, "no prefix cache", "--disable-radix", "--no-enable-prefix-caching")
    overlap_depth: int = flag(1, "steps planned past the last result: 0, 1 or 2")
    disable_overlap: bool = flag(False, "the same as --overlap-depth 0")
    seed: int | None = flag(None, "of dummy weights, and of the seeds of requests that bring none", "--random-seed")
    host: str = flag("127.0.0.1", "address of the HTTP server")
    port: int = flag(8000, "of the HTTP server; 0 takes a free one")
    api_key: str | None = flag(
        None,
        "keys that HTTP requests must bring: @FILE, one a line, or KEY,KEY (which ps shows)",
    )
    cors_origins: str | None = flag(None, "origins whose pages may ask, comma-separated, or * (default: none)")
    ssl_keyfile: str | None = flag(None, "PEM; with --ssl-certfile the HTTP server speaks TLS")
    ssl_certfile: str | None = flag(None, "PEM")
    write_timeout: float = flag(60.0, "seconds that an HTTP client may leave its stream unread before it is closed")
    enable_log_requests: bool = flag(False, "log each HTTP request's path, status and time", "--log-requests")
    logits_processors: str | None = flag(
        None, "NAME=module:callable, comma-separated: callables that requests may name to change their logits"
    )
    zmq_address: str | None = flag(
        None, "public address, such as tcp://127.0.0.1:5555 (default: a private ipc:// path)"
    )
    sim_launch_ms: float | None = flag(None, "the host's work per step on sim:NAME (default: the model's, with graphs)")
    sim_launch_work: str = flag("torch", "what that work is made of: dispatches or bytecode", choices=KINDS)
    startup_timeout: float = flag(600.0, "seconds until the processes must be ready")
    shutdown_timeout: float = flag(30.0, "seconds that running requests get at the end")
    log_level: str = flag("warning", "debug, info, warning or error", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for one in fields(self):
            choices = one.metadata["choices"]
            if choices and getattr(self, one.name) not in choices:
                raise UsageError(f"--{one.name.replace('_', '-')} must be {', '.join(choices)}")
        for name, fine, words in (
            ("overlap_depth", self.overlap_depth in (0, 1, 2), "0, 1 or 2"),
            ("overlap_depth", self.overlap_depth < 2 or not self.disable_overlap, "left out beside --disable-overlap"),
            ("max_num_seqs", 1 <= self.max_num_seqs <= 16384, "between 1 and 16384"),
            ("block_size", 1 <= self.block_size <= 1024, "between 1 and 1024"),
            ("max_num_batched_tokens", self.max_num_batched_tokens >= self.max_num_seqs, "at least max_num_seqs"),
            (
                "gpu_memory_utilization",
                self.gpu_memory_utilization is None or 0 < self.gpu_memory_utilization <= 1,
                "above 0, at most 1",
            ),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("num_blocks", self.num_blocks is None or self.num_blocks >= 2, "at least 2"),
            ("max_num_queued_reqs", (self.max_num_queued_reqs or 0) >= 0, "at least 0"),
            ("tensor_parallel_size", self.tensor_parallel_size in (None, *range(1, 65)), "between 1 and 64"),
            ("seed", 0 <= (self.seed or 0) < 2**64, "between 0 and 2**64 - 1"),
            (
                "device",
                self.simulated or self.device in ("auto", "cuda", "cpu"),
                "auto, cuda, cpu, sim or sim:NAME",
            ),
            ("port", 0 <= self.port <= 65535, "between 0 and 65535"),
            ("write_timeout", self.write_timeout > 0, "above 0"),
            ("ssl_keyfile", bool(self.ssl_keyfile) == bool(self.ssl_certfile), "given together with --ssl-certfile"),
            ("logits_processors", not (self.processors and self.simulated), "left out on a simulated device"),
            ("quantization", self.quantization == "none" or not self.simulated, "left out on a simulated device"),
            (
                "quantization",
                not (self.quantization == "gguf" and self.load_format == "dummy"),
                "none, int8 or int4 for dummy weights",
            ),
            ("sim_launch_ms", (self.sim_launch_ms or 0) >= 0, "at least 0"),
            ("sim_launch_ms", self.sim_launch_ms is None or self.timing, "left out unless --device is sim:NAME"),
        ):
            if not fine:
                raise UsageError(f"--{name.replace('_', '-')} must be {words}")
        if self.timing:
            try:
                roofline(self.timing)
            except ValueError as error:
                raise UsageError(f"--device {self.device}: {error}") from None

    @property
    def for_gpus(self) -> list[str]:
        """The options given that only a GPU has; `enforce_eager` holds of a CPU anyway."""
        names = ("kv_cache_dtype", "attention_backend", "token_table")
        return [f"--{name.replace('_', '-')} {value}" for name in names if (value := getattr(self, name)) != "auto"]

    @property
    def simulated(self) -> bool:
        return self.device.partition(":")[0] == "sim"

    @property
    def timing(self) -> str:
        """The name of a simulated device that takes time; "" for any other."""
        return self.device.partition(":")[2] if self.simulated else ""

    @property
    def processors(self) -> dict[str, str]:
        """name → module:callable. Raises `UsageError`."""
        found = {}
        for part in (self.logits_processors or "").split(",") if self.logits_processors else ():
            name, _, place = (piece.strip() for piece in part.partition("="))
            if not name or not all(place.partition(":")):
                raise UsageError(f"--logits-processors: {part.strip()!r} is not NAME=module:callable")
            found[name] = place
        return found

    @property
    def depth(self) -> int:
        return 0 if self.disable_overlap else self.overlap_depth


def settings_from(**changes: Any) -> Settings:
    """`Settings` by keyword, for Python callers. Raises `UsageError` with the nearest name for an unknown one."""
    known = [one.name for one in fields(Settings)]
    for name in changes:
        if name not in known:
            raise UsageError(f"unknown setting {name}{_nearest(name, known)}")
    return Settings(**changes)


def positive(text: str) -> int:
    """An argument's type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """The fields of `Settings` as options but those `without`; `model` is also the positional argument."""
    parser.add_argument("model_positional", nargs="?", metavar="MODEL", help="the same as --model")
    for one in fields(Settings):
        if one.name in without:
            continue
        name = f"--{one.name.replace('_', '-')}"
        options: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": _help(one)}
        if one.type == "bool":
            options["action"] = "store_true"
        else:
            options["type"] = float if "float" in str(one.type) else int if "int" in str(one.type) else str
            options["choices"] = one.metadata["choices"]
        parser.add_argument(name, *one.metadata["aliases"], **options)


def from_arguments(arguments: argparse.Namespace) -> Settings:
    """Raises `UsageError`."""
    given = {one.name: getattr(arguments, one.name) for one in fields(Settings) if hasattr(arguments, one.name)}
    positional = getattr(arguments, "model_positional", None)
    if positional is not None:
        if given.get("model", positional) != positional:
            raise UsageError(f"two models are named: {positional} and --model {given['model']}")
        given["model"] = positional
    return Settings(**given)


def non_defaults(settings: Settings) -> str:
    """One line of what differs from the defaults."""
    shown = replace(settings, api_key="***") if settings.api_key and not settings.api_key.startswith("@") else settings
    changed = [(one.name, getattr(shown, one.name)) for one in fields(Settings)]
    defaults = {one.name: one.default for one in fields(Settings)}
    return " ".join(f"{name}={value}" for name, value in changed if value != defaults[name]) or "all defaults"


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag for an unknown one and exits with 2."""

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """As `parse_args`; an unknown option's nearest neighbour is one of the same command."""
        given, rest = self.parse_known_args(arguments)
        if rest:
            unknown = rest[0].split("=")[0]
            self.error(f"unknown argument {unknown}{_nearest(unknown, list(_options(self, given)))}")
        return given

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[str]:
    """Every option of the parser and of the sub-command that was given."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            yield from _options(action.choices[getattr(given, action.dest)], given)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _help(one: Any) -> str:
    default = "" if one.default in (None, False, MISSING) else f" (default: {one.default})"
    return f"{one.metadata['help']}{default}".replace("%", "%%")
