"""NVRTC to cubins, with a content-addressed cache. Needs no GPU and no driver.

A cubin's name is the hash of everything that it is made from: the source text, every byte of the device headers, the
options and the compiler's version. A build writes to a temporary file, syncs it and renames it; losing a race is fine.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from backends.errors import BuildFailed, BuildUnavailable

INCLUDE = Path(__file__).parent / "include"
# -fmad=false: a fused operation stands where the source says so, or the two shells could differ in bits.
OPTIONS = ("-std=c++17", "-default-device", "-fmad=false", "--ptxas-options=-v", "-lineinfo")


@dataclass(frozen=True)
class Cubin:
    """A built binary.

    Attributes:
        path: in the cache.
        registers: per thread, the most over the kernels in it.
        spill_bytes: spilled stores and loads, summed.
    """

    path: Path
    registers: int
    spill_bytes: int


def default_cache() -> Path:
    """`SPANTUNE_CACHE_DIR`, else the user's cache folder."""
    named = os.environ.get("SPANTUNE_CACHE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "spantune"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Content hash of all device headers, 16 hex digits: the identity of the kernels that a number speaks for."""
    digest = hashlib.sha256()
    for path in sorted(INCLUDE.rglob("*.cuh")):
        digest.update(path.relative_to(INCLUDE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """NVRTC's version.

    Raises:
        BuildUnavailable: NVRTC or its Python bindings are not installed.
    """
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader raises types of its own when a library is missing
        raise BuildUnavailable(f"NVRTC is not available ({error}): install spantune[cuda13]") from error
    return f"nvrtc-{major}.{minor}" if int(code) == 0 else "nvrtc"


def cubin_path(source: str, arch: str, cache: Path) -> Path:
    """Where the cubin of a source lies or will lie."""
    text = "\0".join((source, source_hash(), arch, compiler_version(), *OPTIONS))
    return cache / "cubins" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"


def build(source: str, arch: str, cache: Path | None = None) -> Cubin:
    """Builds one source for one target, or finds it in the cache.

    Args:
        source: translation unit.
        arch: such as `sm_90a`.
        cache: folder of the cache, `default_cache()` when None.

    Raises:
        BuildFailed: with the compiler's log.
        BuildUnavailable: no compiler.
    """
    path = cubin_path(source, arch, cache or default_cache())
    log_path = path.with_suffix(".log")
    if not (path.exists() and log_path.exists()):
        binary, log = _compile(source, arch)
        write_whole(log_path, log.encode())
        write_whole(path, binary)
    log = log_path.read_text()
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    return Cubin(path, max(registers, default=0), sum(spills))


def build_all(sources: Iterable[tuple[str, str]], cache: Path | None = None, workers: int | None = None) -> list[Cubin]:
    """Builds many (source, arch) pairs in processes (NVRTC threads do not scale); order is kept.

    Raises:
        BuildFailed: the first failure, after the others ended.
    """
    pairs = list(dict.fromkeys(sources))
    folder = cache or default_cache()
    missing = [pair for pair in pairs if not cubin_path(*pair, folder).exists()]
    workers = min(workers or os.cpu_count() or 1, max(len(missing), 1))
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(_build_quietly, [(*pair, folder) for pair in missing], chunksize=2))
    return [build(source, arch, folder) for source, arch in pairs]


def _build_quietly(job: tuple[str, str, Path]) -> None:
    # A failure shows again, with its log, when the parent asks for this source.
    try:
        build(*job)
    except BuildFailed:
        return


def _compile(source: str, arch: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    def call(name: str, *arguments: object) -> Sequence[object]:
        code, *values = getattr(nvrtc, name)(*arguments)
        if int(code) != 0:
            raise BuildFailed(f"{name} failed with {code.name}")
        return values

    (program,) = call("nvrtcCreateProgram", source.encode(), b"spantune.cu", 0, [], [])
    try:
        options = [f"--gpu-architecture={arch}", f"-I{INCLUDE}", *OPTIONS]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        (size,) = call("nvrtcGetProgramLogSize", program)
        buffer = bytes(int(size) + 1)  # type: ignore[call-overload]  # more than one, since small bytes are shared
        call("nvrtcGetProgramLog", program, buffer)
        log = buffer.decode(errors="replace").strip("\0 \n")
        if int(code) != 0:
            raise BuildFailed(f"a kernel does not compile for {arch}: {_first_error(log)}", log)
        (size,) = call("nvrtcGetCUBINSize", program)
        binary = bytes(int(size) + 1)  # type: ignore[call-overload]
        call("nvrtcGetCUBIN", program, binary)
        return binary[:-1], log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _first_error(log: str) -> str:
    return next((line for line in log.splitlines() if "error" in line), log[:200])


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
