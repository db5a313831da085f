"""Compiles the simulated runtime that takes the place of CANN's libraries. Needs gcc and nm, nothing of CANN."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
RUNTIME_LIBRARY = "libascendcl.so"
# The other libraries that torch_npu is linked against; each is empty and points at the runtime.
EMPTY_LIBRARIES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")
# CANN's C names. Everything else that torch_npu misses comes from torch or the C and C++ libraries.
CANN_NAME = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl)\w+")
DEFINITION = re.compile(r"^(?:aclError|const char \*|size_t) ?(\w+)\(|^ACCEPT\((\w+)\(", re.MULTILINE)
COMPILE = ("-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-fno-builtin")


class ToolchainMissing(RuntimeError):
    """gcc or nm is not installed."""


def require_toolchain() -> None:
    """Raises ToolchainMissing when gcc or nm (binutils) is not on the PATH."""
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        raise ToolchainMissing(
            f"the NPU simulator needs {' and '.join(missing)} to build its runtime: install gcc and binutils"
        )


def source_digest() -> str:
    """A hash over everything that decides what the built libraries contain."""
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _symbols(library: Path, flag: str) -> set[str]:
    out = subprocess.run(["nm", "-D", flag, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines()}


def missing_symbols(torch_npu: Path) -> list[str]:
    """The CANN functions that the wheel's libraries need and do not define, sorted.

    ``torch_npu`` is the package's folder. The library for ATB operators is left out: torch_npu loads it on demand.
    """
    libraries = [p for p in [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")] if "atb" not in p.name]
    needed = set().union(*(_symbols(p, "--undefined-only") for p in libraries))
    defined = set().union(*(_symbols(p, "--defined-only") for p in libraries))
    return sorted(name for name in needed - defined if CANN_NAME.fullmatch(name))


def _refusing_stubs(names: list[str]) -> str:
    head = "int sim_unsupported(const char *symbol);\n"
    return head + "".join(f'int {name}(void) {{ return sim_unsupported("{name}"); }}\n' for name in names)


def build(torch_npu: Path, into: Path) -> list[str]:
    """Builds the runtime and the empty libraries into ``into``; returns the names that got a refusing stub.

    Raises ToolchainMissing, or subprocess.CalledProcessError with the compiler's own text in ``stderr``.
    """
    require_toolchain()
    sources = sorted(SOURCES.glob("*.c"))
    defined = {a or b for path in sources for a, b in DEFINITION.findall(path.read_text())}
    stubs = [name for name in missing_symbols(torch_npu) if name not in defined]
    into.mkdir(parents=True, exist_ok=True)
    headers = torch_npu / "include/third_party/acl/inc"
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        generated, empty = Path(scratch, "stubs.c"), Path(scratch, "empty.c")
        generated.write_text(_refusing_stubs(stubs))
        empty.write_text("")
        runtime = [f"-I{headers}", f"-Wl,-soname,{RUNTIME_LIBRARY}", *map(str, [*sources, generated]), "-lpthread"]
        _gcc("-o", str(into / RUNTIME_LIBRARY), *runtime)
        for name in EMPTY_LIBRARIES:
            link = ["-Wl,--no-as-needed", str(empty), f"-L{into}", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
            _gcc("-o", str(into / name), f"-Wl,-soname,{name}", *link)
    return stubs


def _gcc(*arguments: str) -> None:
    subprocess.run(["gcc", *COMPILE, *arguments], check=True, capture_output=True, text=True)
