"""Builds cpmcu.C from csrc/: finds the compilers, writes one ninja file, runs it. Needs no torch.

`python setup.py config` prints this text and the configuration. Environment variables:
  CPMCU_WITH_CUDA     0: CPU only; 1: CUDA, or fail without nvcc (default: 1 if a GPU is visible)
  CPMCU_CUDA_ARCH     builds CUDA for a comma list of architectures, e.g. 80,90a, or for all
                      (default: the GPUs present, else 90a)
  CUDA_HOME, CXX      toolkit folder (else PATH, /usr/local/cuda, PyPI wheels); host compiler (g++)
  MAX_JOBS            parallel compilations (default: one per core and per 2 GiB of free memory)
  CPMCU_DEBUG=1       -O0 -g for host code; device code keeps its optimisation
  CPMCU_NVCC_FLAGS    further flags for nvcc, e.g. -Xptxas=-v
  CPMCU_TRACE=1       kernels record clock stamps, for scripts/trace_layer.py
  CPMCU_SANITIZE      address: CPU only, with AddressSanitizer; never copied into cpmcu/
  CPMCU_SKIP_BUILD=1  compile nothing (compile later with `python setup.py build_ext --inplace`)
  CPMCU_LOCAL_VERSION the end of the version: cpu makes 0.1.0+cpu (`make wheel` sets it)
Each build leaves its module in build/<tag>/; CPMCU_EXTENSION_DIR=build/<tag> makes cpmcu import it.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools import __version__ as setuptools_version
from setuptools.command.build_ext import build_ext

# The table of GPU architectures. An 'a' architecture has instructions of that chip only. Files
# named *_sm90.cu need it, and files named *_sm80.cu are for all others. Its PTX does not run on
# other chips, so only a plain number embeds PTX.
ARCHS = {"80": "A100", "86": "RTX 30, A10", "87": "Orin", "89": "RTX 40, L4, L40S"}
ARCHS |= {"90": "Hopper without wgmma", "90a": "H100, H200", "100": "B200", "120": "RTX 50"}

# Rough times of ninja's steps on one core, in seconds; nvcc's is for one architecture.
SECONDS = {"cxx": 5, "nvcc": 120, "link": 2}

# ninja's rule for one source file. The compiler writes the list of headers (depfile).
RULE = "rule {name}\n  command = {command} $flags -MMD -MF $out.d -c $in -o $out\n"
RULE += "  depfile = $out.d\n  deps = gcc\n  description = {name} $in\n"

NEW_SETUPTOOLS = int(setuptools_version.partition(".")[0]) >= 77

os.chdir(Path(__file__).resolve().parent)  # every path below is relative to the project
os.environ["NINJA_STATUS"] = "[%f/%t] "  # Progress reads it
env = os.environ.get


def output_of(*command):
    """Returns the output of a command; "" if the command is missing or fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def check_compiler():
    """Exits unless $CXX is g++ 12 or later."""
    command = shlex.split(env("CXX") or "g++")
    path, version = shutil.which(command[0]), output_of(*command, "-dumpfullversion")
    if path is None:
        found = f"no {command[0]} on PATH"
    elif not version:  # another compiler
        found = f"{path}: {output_of(*command, '--version').partition(chr(10))[0] or 'no version'}"
    else:
        found = f"{version} ({path})"
    if not version or int(version.partition(".")[0]) < 12:
        sys.exit(
            f"g++ 12 or later is needed, found {found}. "
            "Install it (Debian, Ubuntu: apt-get install g++), or name it: CXX=g++-12"
        )


def find_cuda():
    """Returns (toolkit folder, its libcudart_static.a, ""), or (None, None, why for the CPU)."""
    if env("CPMCU_WITH_CUDA") == "0" or env("CPMCU_SANITIZE"):
        return None, None, "CPMCU_WITH_CUDA=0" if not env("CPMCU_SANITIZE") else "CPMCU_SANITIZE"
    asked = env("CPMCU_WITH_CUDA") == "1" or env("CPMCU_CUDA_ARCH")
    if not asked and "GPU " not in output_of("nvidia-smi", "-L"):
        return None, None, "no GPU is visible; CPMCU_WITH_CUDA=1 adds CUDA"
    on_path = Path(shutil.which("nvcc") or "/none/bin/nvcc").resolve().parents[1]
    wheels = [Path(folder, "nvidia/cu13") for folder in sys.path]
    for home in [Path(env("CUDA_HOME") or "/none"), on_path, Path("/usr/local/cuda"), *wheels]:
        for lib in ("lib64", "lib", "lib/x86_64-linux-gnu", "targets/x86_64-linux/lib"):
            # Requiring the library skips wrapper scripts such as /usr/local/bin/nvcc.
            if (home / "bin/nvcc").exists() and (home / lib / "libcudart_static.a").exists():
                return home, home / lib / "libcudart_static.a", ""
    missing = "CUDA_HOME, PATH and /usr/local/cuda have no CUDA toolkit"
    if env("CPMCU_WITH_CUDA") == "1":
        sys.exit(f"CPMCU_WITH_CUDA=1, but {missing}.")
    return None, None, missing


def wanted_archs():
    archs = {a.strip() for a in env("CPMCU_CUDA_ARCH", "").split(",") if a.strip()}
    if archs == {"all"}:
        return list(ARCHS)
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    for capability in () if archs else output_of(*query).split():
        number = int(capability.replace(".", ""))
        # Code for x.y runs on x.z if z >= y: take the nearest known architecture of the same major.
        fits = [a for a in ARCHS if a.isdigit() and number // 10 * 10 <= int(a) <= number]
        archs.add("90a" if number == 90 else (fits or [capability])[-1])
    if unknown := archs - ARCHS.keys():
        sys.exit(f"Unknown CUDA architecture {', '.join(unknown)}; known: all, {', '.join(ARCHS)}.")
    return [a for a in ARCHS if a in (archs or {"90a"})]


def gencode(archs):
    codes = [(a, f"sm_{a}") for a in archs]
    codes += [(a, f"compute_{a}") for a in archs if a.isdigit()][-1:]
    return " ".join(f"-gencode arch=compute_{a},code={code}" for a, code in codes)


def pybind_flags():
    specs = [importlib.util.find_spec(name) for name in ("pybind11", "torch")]  # torch ships a copy
    roots = [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    if not roots:
        sys.exit("Building cpmcu needs pybind11: pip install pybind11")
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        sys.exit(
            f"Building cpmcu needs Python's headers, but {include} has no Python.h. "
            "Install them (Debian, Ubuntu: apt-get install python3-dev)."
        )
    return f"-isystem {include} -isystem {roots[0]}/include"


def configure():
    """Returns the configuration, why it is for the CPU, the module's path and ninja's file."""
    (cuda, cudart, why_cpu), cxx = find_cuda(), env("CXX") or "g++"
    sanitize = env("CPMCU_SANITIZE", "")
    if sanitize not in ("", "address"):
        sys.exit(f"CPMCU_SANITIZE={sanitize}, but the only sanitizer supported is 'address'.")
    archs, debug = wanted_archs() if cuda else [], env("CPMCU_DEBUG") == "1"
    tag = "asan" if sanitize else "-".join(["cuda", *archs] if cuda else ["cpu"])
    trace = bool(archs) and env("CPMCU_TRACE") == "1"
    tag += "-debug" * debug + "-trace" * trace
    info = {"tag": tag, "archs": archs, "cxx": output_of(*shlex.split(cxx), "-dumpfullversion")}
    info["nvcc"] = output_of(f"{cuda}/bin/nvcc", "--version").partition(" V")[2].partition("\n")[0]
    info["commit"] = output_of("git", "rev-parse", "--short=12", "HEAD")

    out, py = f"build/{tag}", "py{}{}".format(*sys.version_info)
    common = f"-std=c++20 {'-O0 -g' if debug else '-O1 -g1' if sanitize else '-O3'} -Icsrc"
    common += " -DCPMCU_WITH_CUDA=1" * bool(cuda) + " -DCPMCU_SM90=1" * ("90a" in archs)
    common += " -DCPMCU_SM80=1" * any(arch != "90a" for arch in archs)
    common += " -DCPMCU_TRACE=1" * trace
    asan = "-fsanitize=address -fno-omit-frame-pointer" if sanitize else ""
    host = f"{cxx} -x c++ {common} -fPIC -fopenmp -Wall -Wextra {asan}"
    host += f" -isystem {cuda}/include" if cuda else ""
    # A file has up to a hundred kernels. On many cores it would end long after the others.
    nvcc = f"{cuda}/bin/nvcc"
    split = "-split-compile=0" * ("-split-compile" in output_of(nvcc, "--help"))
    device = f"{nvcc} -ccbin {cxx} {common} {split} -lineinfo --expt-relaxed-constexpr"
    device += f" -diag-error 20278,20280 -Xcompiler -fPIC,-fopenmp {env('CPMCU_NVCC_FLAGS', '')}"
    link = f"{cxx} -shared -fopenmp {asan} -Wl,--exclude-libs,ALL -o $out $in "
    link += f"{cudart} -ldl -lrt -lpthread" if cuda else ""
    text = f"builddir = {out}\n" + RULE.format(name="cxx", command=host)
    text += RULE.format(name="nvcc", command=device)
    text += f"rule link\n  command = {link}\n  description = link $out\n"
    define = shlex.quote("-DCPMCU_BUILD_INFO=" + json.dumps(json.dumps(info)))
    # Compiling pybind11's headers takes seconds. So the bindings are two translation units of
    # similar size, with little optimisation: the engine's bindings, and the rest.
    joined = sorted(Path("csrc").rglob("bind_*.cpp"))
    joined.remove(engine := Path("csrc/engine/bind_engine.cpp"))
    beside = [source for source in joined if source.parent == engine.parent]
    rest = [source for source in joined if source not in beside]
    python = f"{pybind_flags()} {'-O0' if debug or sanitize else '-O1'}"
    flags_of = {
        engine: " -include ".join([python, *map(str, beside)]),
        Path("csrc/entry.cu"): " -include ".join([python, *map(str, rest)]),
        Path("csrc/build_info.cpp"): define.replace("$", "$$"),
    }
    objects = []
    for source in sorted(p for p in Path("csrc").rglob("*") if p.suffix in (".cpp", ".cu")):
        fits = [a for a in archs if not source.stem.endswith("_sm80" if a == "90a" else "_sm90")]
        host_only = source.suffix == ".cpp" or source in flags_of
        if source in joined or not (host_only or fits):
            continue
        rule, flags = ("cxx", flags_of.get(source, "")) if host_only else ("nvcc", gencode(fits))
        folder = py if python in flags else "core"
        objects.append(f"{out}/{folder}/{source.relative_to('csrc')}.o")
        text += f"build {objects[-1]}: {rule} {source}\n  flags = {flags}\n"
    module = f"{out}/C{sysconfig.get_config_var('EXT_SUFFIX')}"
    return info, why_cpu, module, text + f"build {module}: link {' '.join(objects)}\n"


def version():
    """cpmcu.__version__ and $CPMCU_LOCAL_VERSION."""
    text = Path("cpmcu/__init__.py").read_text()
    (number,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return f"{number}+{local}" if (local := env("CPMCU_LOCAL_VERSION")) else number


class Progress:
    """Runs ninja. On a terminal a bar shows the files done, of how many, and the time left.

    pip hides stdout, so under pip the bar goes to /dev/tty.
    """

    WIDTH = 30

    def __init__(self, ninja, archs, jobs):
        self.ninja, self.archs, self.jobs = ninja, archs, jobs
        listed = output_of(*ninja, "-n").splitlines()
        steps = [line.partition("] ")[2] for line in listed if line.startswith("[")]
        self.files, self.work = len(steps), sum(map(self.seconds, steps))  # still to do
        self.start, self.done = time.monotonic(), 0
        self.terminal = sys.stdout if sys.stdout.isatty() else None
        if self.terminal is None and env("PIP_BUILD_TRACKER"):
            with contextlib.suppress(OSError):  # no terminal
                self.terminal = open("/dev/tty", "w")  # noqa: SIM115

    def seconds(self, step):
        """The estimated time of a step ("nvcc csrc/file.cu") on one core."""
        rule, source = step.split()
        return SECONDS[rule] * (len(self.archs) if rule == "nvcc" and "_sm90" not in source else 1)

    def say(self, text):
        """Prints a line, and shows it on the terminal if stdout is hidden."""
        print(text, flush=True)
        if self.terminal not in (None, sys.stdout):
            print("\n" + text, file=self.terminal, flush=True)

    def run(self):
        """Returns ninja's exit status."""
        files = 0
        with subprocess.Popen(self.ninja, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                counted, _, step = line.partition("] ")
                is_step = counted.startswith("[") and step.split()[0] in SECONDS
                if not is_step or self.terminal is not sys.stdout:
                    print("\r\033[K" * (self.terminal is sys.stdout) + line, end="", flush=True)
                if is_step:
                    self.done += self.seconds(step)
                    files += 1
                if self.terminal:
                    print(self.bar(files), end="", file=self.terminal, flush=True)
        if self.terminal and files:
            print("\r\033[K", end="", file=self.terminal, flush=True)
        return process.returncode

    def bar(self, files):
        # The estimate counts as much as a minute of compiling.
        elapsed = time.monotonic() - self.start + 60
        left = int(max(0, self.work - self.done) * elapsed / (self.done + 60 * self.jobs))
        full = "#" * round(self.WIDTH * min(1, self.done / self.work)) if self.work else ""
        time_left = f"{left // 60}:{left % 60:02} left"
        return f"\r\033[K[{full:<{self.WIDTH}}] {files}/{self.files} files, {time_left} "


def what_is_built(info, why_cpu, progress):
    """One sentence: the back ends, the number of files, and roughly how long compiling takes."""
    cuda = ", ".join(f"sm_{a} ({ARCHS[a]})" for a in info["archs"])
    what = f"the CPU engine and CUDA for {cuda}" if cuda else f"the CPU engine only ({why_cpu})"
    if not progress.files:
        return f"cpmcu: {what}; everything is compiled"
    minutes = round(progress.work / progress.jobs / 60)
    took = f"{round(minutes / 60)} hours" if minutes > 100 else f"{max(1, minutes)} min"
    return f"cpmcu: compiling {what}: {progress.files} files, about {took} with -j {progress.jobs}"


def ninja_command(file):
    """Returns the command and how many files it compiles side by side."""
    # One job per core and per 2 GiB of free memory. `pip install -v` shows ninja's output.
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    fit = int(meminfo["MemAvailable"].split()[0]) >> 21
    jobs = int(env("MAX_JOBS") or max(1, min(len(os.sched_getaffinity(0)), fit)))
    ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
    if not shutil.which(ninja[0]):
        sys.exit("Building cpmcu needs ninja: pip install ninja")
    return [*ninja, "-f", str(file), "-j", str(jobs)], jobs


class BuildExt(build_ext):
    def run(self):
        if env("CPMCU_SKIP_BUILD") == "1":
            return
        check_compiler()
        info, why_cpu, module, text = configure()
        ninja_file = Path(module).with_suffix(".ninja")
        ninja_file.parent.mkdir(parents=True, exist_ok=True)
        ninja_file.write_text(text)
        command, jobs = ninja_command(ninja_file)
        progress = Progress(command, info["archs"], jobs)
        progress.say(what_is_built(info, why_cpu, progress))
        print(json.dumps(info), flush=True)
        if progress.run():
            sys.exit("Building cpmcu.C failed; the compiler's message is above.")
        if env("CPMCU_SANITIZE"):
            return
        in_place = self.inplace or self.editable_mode
        target = Path("" if in_place else self.build_lib, "cpmcu", Path(module).name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renaming instead of overwriting: a running process may have the old file mapped. Builds
        # with different tags may run side by side.
        os.replace(shutil.copy2(module, target.with_name(f"{info['tag']}.so.new")), target)
        if not in_place:
            copy_headers(target.with_name("include"))


def copy_headers(target):
    """Copies the headers that plugins include: cpmcu.get_include() of an installed cpmcu."""
    shutil.rmtree(target, ignore_errors=True)
    for header in sorted(Path("csrc").rglob("*.*h")):
        copy = target / header.relative_to("csrc")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(header, copy)


if sys.argv[1:] == ["config"]:
    found, why_cpu, *_ = configure()
    print(__doc__, json.dumps(found, indent=2), why_cpu and f"for the CPU: {why_cpu}", sep="\n")
else:
    setup(
        version=version(),
        # Here because setuptools before 77 refuses an expression in pyproject.toml.
        **{"license_expression" if NEW_SETUPTOOLS else "license": "Apache-2.0"},
        ext_modules=[Extension("cpmcu.C", sources=[])],
        cmdclass={"build_ext": BuildExt},
        options={"build": {"build_base": "build/python"}},
    )
