"""Environments of the peers, each in `.cache/peers/NAME`, made by pip when it is not there yet.

Before anything is installed pip says what it would pull: a peer that needs a CUDA build of torch is left out.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.plan import ROOT
from benchmarks.results import say

FOLDER = ROOT / ".cache" / "peers"
INSTALL_TIMEOUT_S = 600.0
READY = ".ready"


class PeerUnavailable(Exception):
    """The peer cannot be installed or started here; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """What pip is asked for; `alone`: in a virtual environment, else in a folder to be used beside our own packages."""

    name: str
    package: str
    requirements: tuple[str, ...]
    alone: bool = True
    plan_timeout_s: float = 240.0

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python" if self.alone else Path(sys.executable)

    def version(self) -> str:
        """Of what is installed."""
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        path = [] if self.alone else [f"import sys; sys.path.insert(0, {str(self.folder)!r})"]
        done = subprocess.run(
            [str(self.python), "-c", "; ".join([*path, code])], capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip() or "?"


def torch_pin() -> str:
    """The very torch that is measured against."""
    return f"torch=={metadata.version('torch').split('+')[0]}"


def recipes() -> dict[str, Recipe]:
    """infinity has its image extra left out: it is for models other than CLIP and asks for torchvision."""
    torch = torch_pin()
    return {
        "infinity": Recipe(
            "infinity",
            "infinity-emb",
            ("infinity-emb[server,torch]==0.0.78", torch, "transformers<5", "pillow", "aiohttp"),
        ),
        "sentence-transformers": Recipe(
            "sentence-transformers", "sentence-transformers", ("sentence-transformers==6.2.0",), alone=False
        ),
        # Of its old dependencies pip tries version after version: a minute and a half shows whether it gets anywhere.
        "clip-as-service": Recipe(
            "clip-as-service", "clip-server", ("clip-server==0.8.3", "clip-client", torch), plan_timeout_s=90.0
        ),
    }


def install(recipe: Recipe) -> None:
    """Makes the environment when it is not complete; raises PeerUnavailable."""
    if (recipe.folder / READY).exists():
        return
    recipe.folder.mkdir(parents=True, exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    if not recipe.alone:
        target = ["--no-deps", "--upgrade", "--target", str(recipe.folder), *recipe.requirements]
        _pip(Path(sys.executable), ["install", *target], INSTALL_TIMEOUT_S)
    else:
        say(f"  making {recipe.folder.relative_to(ROOT)}")
        _run([sys.executable, "-m", "venv", str(recipe.folder)], 120.0)
        refuse_cuda(recipe)
        say(f"  installing {', '.join(recipe.requirements)}")
        _pip(recipe.python, ["install", *recipe.requirements], INSTALL_TIMEOUT_S)
    (recipe.folder / READY).touch()


def refuse_cuda(recipe: Recipe) -> None:
    """Raises PeerUnavailable when pip would pull a CUDA build of torch, which is several GB."""
    told = _pip(recipe.python, ["install", "--dry-run", *recipe.requirements], recipe.plan_timeout_s)
    would = next((line for line in told.splitlines() if line.startswith("Would install ")), "")
    heavy = [name for name in would.removeprefix("Would install ").split() if name.startswith(("nvidia-", "cuda-"))]
    if heavy:
        raise PeerUnavailable(
            f"not installed: it needs a CUDA build of torch, several GB ({heavy[0]} and {len(heavy) - 1} more)"
        )


def _pip(python: Path, arguments: Sequence[str], timeout_s: float) -> str:
    quiet = ["--disable-pip-version-check", "--progress-bar", "off", "--no-input"]
    return _run([str(python), "-m", "pip", arguments[0], *quiet, *arguments[1:]], timeout_s)


def _run(command: Sequence[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"not installed: pip was not done after {timeout_s:g} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise PeerUnavailable("not installed: " + " ".join((errors or ["pip gave no reason"])[0].split())[:300])
    return done.stdout
