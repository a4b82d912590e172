"""Builds, checks and tries what is released: the commands of `make dist`, `try` and `release`.

What is built is the commit, and not the working tree. It needs only the standard library, because
`programs` runs with the Python of an environment that has nothing but the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLACES = (("0o022", "UTC"), ("0o077", "Asia/Tokyo"))
"""The umask and the time zone of each of the two builds, neither of which may show in a file."""
PROGRAM = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
"""A link that leads nowhere outside of the repository."""


class Refused(Exception):
    """What is wrong, and what to change; one sentence."""


def run(*command: str | Path, **options: Any) -> str:
    """The output of a command, which must succeed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def project(root: Path = ROOT) -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def notes(changelog: str, version: str) -> tuple[str, str]:
    """The date of a version in the changelog, and what the changelog says about it.

    Raises:
        Refused: if the changelog does not have the version.
    """
    found = re.search(
        rf"^## \[{re.escape(version)}\](?: - ([^\n]*))?\n(.*?)(?=^## |\Z)",
        changelog,
        flags=re.DOTALL | re.MULTILINE,
    )
    if found is None:
        raise Refused(f"CHANGELOG.md has no section [{version}]; write what is new in it.")
    return found[1] or "", found[2].strip() + "\n"


def refuse(root: Path = ROOT) -> None:
    """Look for what only the owner can mend, before anything is built.

    Raises:
        Refused: if there is something.
    """
    settings = project(root)
    version = settings["project"]["version"]
    if not settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]:
        raise Refused(
            "pyproject.toml does not say where the repository is; set `repository` below"
            " [tool.hatch.metadata.hooks.custom]."
        )
    date, _ = notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise Refused(f"CHANGELOG.md has no date for {version}; write '## [{version}] - DATE'.")
    if run("git", "status", "--porcelain", cwd=root):
        raise Refused("The working tree has changes that no commit has; commit or remove them.")
    tags = run("git", "tag", "--list", f"v{version}", cwd=root).split()
    if tags and run("git", "rev-list", "-n1", tags[0], cwd=root) != run(
        "git", "rev-parse", "HEAD", cwd=root
    ):
        raise Refused(f"The tag v{version} is on another commit; raise the version.")


def dist() -> None:
    """Build the commit twice, compare the bytes, check the files, and put them into dist.

    Raises:
        Refused: if the builds differ, or a file lacks something.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as folder:
        built = [_build(Path(folder, str(n)), epoch, *at) for n, at in enumerate(PLACES)]
        first, second = ({f.name: f.read_bytes() for f in out.iterdir()} for out in built)
        if first != second:
            names = sorted(n for n in first.keys() | second.keys() if first.get(n) != second.get(n))
            raise Refused(f"Two builds of one commit differ in {', '.join(names)}; see PLACES.")
        shutil.copytree(built[0], DIST)
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    _check(next(DIST.glob("*.whl")))
    for file in files:
        print(f"{sha256(file.read_bytes()).hexdigest()}  {file.relative_to(ROOT)}")


def _build(folder: Path, epoch: str, umask: str, zone: str) -> Path:
    """Build HEAD in `folder`: the sdist, and the wheel from that. Returns where they are."""
    source, out = folder / "source", folder / "out"
    folder.mkdir()
    run("git", "archive", "--format=tar", "-o", folder / "head.tar", "HEAD", cwd=ROOT)
    with tarfile.open(folder / "head.tar") as archive:
        archive.extractall(source, filter="data")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "TZ": zone}
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    run(*command, env=environment, umask=int(umask, 8))
    return out


def _check(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
    for needed in ("aprilsched/py.typed", "LICENSE"):
        if not any(name.endswith(needed) for name in names):
            raise Refused(f"{wheel.name} has no {needed}; add it to what is built.")
    if "\nProject-URL: " in metadata and (found := LINK.search(metadata)):
        raise Refused(f"The README in {wheel.name} has a link to {found[1]}; see hatch_build.py.")


def try_on(pythons: Sequence[str], torch: str) -> None:
    """Install the wheel for each of `pythons` that is there, in an environment of its own, and run
    the programs there.

    Args:
        pythons: commands, such as python3.12.
        torch: the requirement of torch; empty for none. Its arguments for pip are in the variable
            TORCH_PIP_ARGS.

    Raises:
        Refused: if none of the Pythons is there.
    """
    wheel = next(DIST.glob("*.whl"))
    tried: list[str] = []
    for python in pythons:
        # A shim of pyenv is there, and ends with an error where its version is not chosen.
        if (
            not shutil.which(python)
            or subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode
        ):
            print(f"{python} is not there, and is left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "venv", folder)
            inside = Path(folder, "bin", "python")
            pip = (inside, "-m", "pip", "--disable-pip-version-check", "install", "-q")
            if torch:
                run(*pip, *os.environ.get("TORCH_PIP_ARGS", "").split(), torch)
            run(*pip, f"{wheel}[cli,report{',torch' if torch else ''}]")
            print(run(inside, "-P", Path(__file__), "programs", cwd=folder), end="", flush=True)
        tried.append(python)
    if not tried:
        raise Refused(f"None of {', '.join(pythons)} is there; name one as PYTHONS.")


@contextmanager
def servers(count: int) -> Generator[list[str]]:
    """The addresses of embedded engines behind SGLang's API, in a process of their own."""
    command = [_script(), "serve-sim", "--port", "0", "--time-scale", "0.001"]
    command += ["--sim.engines", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = (process.stdout.readline() for _ in range(count))
            yield [re.search(r"http://\S+", line)[0] for line in lines]  # type: ignore[index]
        finally:
            process.terminate()


def _script() -> str:
    return str(Path(sysconfig.get_path("scripts"), "aprilsched"))


def programs() -> None:
    """Run the README's program and the command line, with what this Python has installed."""
    import aprilsched  # what is installed, which nothing else here needs

    where = Path(aprilsched.__file__)
    if where.is_relative_to(ROOT) or sysconfig.get_path("purelib") not in str(where):
        raise Refused(f"aprilsched comes from {where} and not from the wheel; run `make try`.")
    said = run(_script(), "--version").split()
    if said != ["aprilsched", project()["project"]["version"]]:
        raise Refused(f"The wheel says {' '.join(said)}; build it again.")
    out = Path("run")
    run(_script(), "run", "--quiet", "--batches", "2", "--out", out)
    run(_script(), "report", out)
    run(_script(), "simulate", "--quiet", "--policy", "sync,april", "--batches", "2")
    done = ["the command line"]
    with servers(2) as urls:
        run(_script(), "run", "--quiet", "--batches", "2", "--out", "live", "--engine", *urls)
        try:
            import torch  # noqa: F401  # pyright: ignore
        except ImportError:
            print("torch is not installed: the README's program is left out")
        else:
            steps = readme(urls, Path("weights").resolve())
            done.append(f"{steps} steps of the README's program")
    print(f"Python {sys.version.split()[0]}: ran {' and '.join(done)}", flush=True)


def readme(urls: Sequence[str], weights: Path) -> int:
    """Run the README's program on servers. Returns the number of steps of its trainer."""
    (program,) = PROGRAM.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    places = dict(zip(re.findall(r"http://[\d.]+:\d+", program), urls, strict=True))
    for old, new in {**places, "/shared/weights": str(weights), "=8192": "=256"}.items():
        program = program.replace(old, new)
    rows: list[int] = []

    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(len(rows)))

    trainer = SimpleNamespace(
        step=lambda tensors: rows.append(len(tensors.input_ids)), save_pretrained=save
    )
    prompts = [[5 + index, 6, 7] for index in range(64)]
    given = {"my_trainer": trainer, "my_dataset": prompts, "my_score": lambda *_: 1.0}
    exec(program, given)  # noqa: S102
    if rows != [256, 256]:
        raise Refused(f"The README's program trained on {rows} rows instead of 256 and 256.")
    return len(rows)


def write_notes() -> None:
    """Write the notes of the version into dist, with links that work on any page."""
    sys.path.insert(0, str(ROOT))
    from hatch_build import from_outside  # pyright: ignore  # it needs the environment of releases

    settings = project()
    version = settings["project"]["version"]
    repository = settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    _, said = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    (DIST / "NOTES.md").write_text(from_outside(said, repository, version), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        match list(arguments):
            case ["refuse"]:
                refuse()
            case ["dist"]:
                dist()
            case ["try", torch, *pythons]:
                try_on(pythons, torch)
            case ["programs"]:
                programs()
            case ["version"]:
                print(project()["project"]["version"])
            case ["notes"]:
                write_notes()
            case _:
                raise Refused("Name one of refuse, dist, try, programs, version and notes.")
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
