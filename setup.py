"""Builds cpmcu.C from csrc/: finds the compilers, writes one ninja file, runs it. Needs no torch.

`python setup.py config` prints this text and the configuration. Environment variables:
  CPMCU_CUDA_ARCH     comma list of architectures, e.g. 80,90a (default: the GPUs present, else 90a)
  CPMCU_WITH_CUDA     0: CPU only; 1: fail without nvcc (default: CUDA if nvcc is found)
  CUDA_HOME, CXX      toolkit folder (else PATH, /usr/local/cuda, PyPI wheels); host compiler (g++)
  MAX_JOBS            parallel compilations (default: one per core and per 2 GiB of free memory)
  CPMCU_DEBUG=1       -O0 -g for host code; device code keeps its optimisation
  CPMCU_NVCC_FLAGS    further flags for nvcc, e.g. -Xptxas=-v
  CPMCU_TRACE=1       kernels record clock stamps, for scripts/trace_layer.py
  CPMCU_SANITIZE      address: CPU only, with AddressSanitizer; never copied into cpmcu/
  CPMCU_SKIP_BUILD=1  compile nothing (compile later with `python setup.py build_ext --inplace`)
Each build leaves its module in build/<tag>/; CPMCU_EXTENSION_DIR=build/<tag> makes cpmcu import it.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The table of GPU architectures. An 'a' architecture has instructions of that chip only. Files
# named *_sm90.cu need it. Its PTX does not run on other chips, so only a plain number embeds PTX.
ARCHS = {"80": "A100", "86": "RTX 30, A10", "87": "Orin", "89": "RTX 40, L4, L40S"}
ARCHS |= {"90": "Hopper without wgmma", "90a": "H100, H200", "100": "B200", "120": "RTX 50"}

# ninja's rule for one source file. The compiler writes the list of headers (depfile).
RULE = "rule {name}\n  command = {command} $flags -MMD -MF $out.d -c $in -o $out\n"
RULE += "  depfile = $out.d\n  deps = gcc\n  description = {name} $in\n"

os.chdir(Path(__file__).resolve().parent)  # every path below is relative to the project
env = os.environ.get


def output_of(*command):
    """Returns the output of a command; "" if the command is missing or fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_cuda():
    """Returns (toolkit folder, its libcudart_static.a), or (None, None) for a CPU build."""
    if env("CPMCU_WITH_CUDA") == "0" or env("CPMCU_SANITIZE"):
        return None, None
    on_path = Path(shutil.which("nvcc") or "/none/bin/nvcc").resolve().parents[1]
    wheels = [Path(folder, "nvidia/cu13") for folder in sys.path]
    for home in [Path(env("CUDA_HOME") or "/none"), on_path, Path("/usr/local/cuda"), *wheels]:
        for lib in ("lib64", "lib", "lib/x86_64-linux-gnu", "targets/x86_64-linux/lib"):
            # Requiring the library skips wrapper scripts such as /usr/local/bin/nvcc.
            if (home / "bin/nvcc").exists() and (home / lib / "libcudart_static.a").exists():
                return home, home / lib / "libcudart_static.a"
    if env("CPMCU_WITH_CUDA") == "1":
        sys.exit("CPMCU_WITH_CUDA=1, but CUDA_HOME, PATH and /usr/local/cuda have no CUDA toolkit.")
    return None, None


def wanted_archs():
    archs = {a.strip() for a in env("CPMCU_CUDA_ARCH", "").split(",") if a.strip()}
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    for capability in () if archs else output_of(*query).split():
        number = int(capability.replace(".", ""))
        # Code for x.y runs on x.z if z >= y: take the nearest known architecture of the same major.
        fits = [a for a in ARCHS if a.isdigit() and number // 10 * 10 <= int(a) <= number]
        archs.add("90a" if number == 90 else (fits or [capability])[-1])
    if unknown := archs - ARCHS.keys():
        sys.exit(f"Unknown CUDA architecture {', '.join(unknown)}; known: {', '.join(ARCHS)}.")
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
    return f"-isystem {sysconfig.get_paths()['include']} -isystem {roots[0]}/include"


def configure():
    """Returns the configuration, the module's path and the text of the ninja file."""
    (cuda, cudart), cxx, sanitize = find_cuda(), env("CXX", "g++"), env("CPMCU_SANITIZE", "")
    if sanitize not in ("", "address"):
        sys.exit(f"CPMCU_SANITIZE={sanitize}, but the only sanitizer supported is 'address'.")
    archs, debug = wanted_archs() if cuda else [], env("CPMCU_DEBUG") == "1"
    tag = "asan" if sanitize else "-".join(["cuda", *archs] if cuda else ["cpu"])
    trace = bool(archs) and env("CPMCU_TRACE") == "1"
    tag += "-debug" * debug + "-trace" * trace
    info = {"tag": tag, "archs": archs, "cxx": output_of(cxx, "-dumpfullversion")}
    info["nvcc"] = output_of(f"{cuda}/bin/nvcc", "--version").partition(" V")[2].partition("\n")[0]
    info["commit"] = output_of("git", "rev-parse", "--short=12", "HEAD")

    out, py = f"build/{tag}", "py{}{}".format(*sys.version_info)
    common = f"-std=c++20 {'-O0 -g' if debug else '-O1 -g1' if sanitize else '-O3'} -Icsrc"
    common += " -DCPMCU_WITH_CUDA=1" * bool(cuda) + " -DCPMCU_SM90=1" * ("90a" in archs)
    common += " -DCPMCU_TRACE=1" * trace
    asan = "-fsanitize=address -fno-omit-frame-pointer" if sanitize else ""
    host = f"{cxx} -x c++ {common} -fPIC -fopenmp -Wall -Wextra {asan}"
    host += f" -isystem {cuda}/include" if cuda else ""
    device = f"{cuda}/bin/nvcc -ccbin {cxx} {common} -lineinfo --expt-relaxed-constexpr"
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
        fits = [a for a in archs if a == "90a" or "_sm90" not in source.stem]
        host_only = source.suffix == ".cpp" or source in flags_of
        if source in joined or not (host_only or fits):
            continue
        rule, flags = ("cxx", flags_of.get(source, "")) if host_only else ("nvcc", gencode(fits))
        folder = py if python in flags else "core"
        objects.append(f"{out}/{folder}/{source.relative_to('csrc')}.o")
        text += f"build {objects[-1]}: {rule} {source}\n  flags = {flags}\n"
    module = f"{out}/C{sysconfig.get_config_var('EXT_SUFFIX')}"
    return info, module, text + f"build {module}: link {' '.join(objects)}\n"


class BuildExt(build_ext):
    def run(self):
        if env("CPMCU_SKIP_BUILD") == "1":
            return
        info, module, text = configure()
        ninja_file = Path(module).with_suffix(".ninja")
        ninja_file.parent.mkdir(parents=True, exist_ok=True)
        ninja_file.write_text(text)
        # One job per core and per 2 GiB of free memory. `pip install -v` shows ninja's output.
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        fit = int(meminfo["MemAvailable"].split()[0]) >> 21
        jobs = env("MAX_JOBS") or str(max(1, min(len(os.sched_getaffinity(0)), fit)))
        ninja = [sys.executable, "-m", "ninja"] if importlib.util.find_spec("ninja") else ["ninja"]
        print("building cpmcu.C:", json.dumps(info), flush=True)
        if subprocess.call([*ninja, "-f", ninja_file, "-j", jobs]):
            sys.exit("Building cpmcu.C failed; the compiler's message is above.")
        if env("CPMCU_SANITIZE"):
            return
        in_place = self.inplace or self.editable_mode
        target = Path("" if in_place else self.build_lib, "cpmcu", Path(module).name)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renaming instead of overwriting: a running process may have the old file mapped. Builds
        # with different tags may run side by side.
        os.replace(shutil.copy2(module, target.with_name(f"{info['tag']}.so.new")), target)


if sys.argv[1:] == ["config"]:
    print(__doc__, json.dumps(configure()[0], indent=2), sep="\n")
else:
    setup(
        license="Apache-2.0",  # here because setuptools before 77 refuses it in pyproject.toml
        ext_modules=[Extension("cpmcu.C", sources=[])],
        cmdclass={"build_ext": BuildExt},
        options={"build": {"build_base": "build/python"}},
    )
