"""The released package: wheel and sdist in environments of their own, and the formula."""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import homebrew_formula
import pytest
from ruamel.yaml import YAML

from mlx_mtp import __version__
from mlx_mtp.models.hub import BUNDLED_MODEL
from mlx_mtp.server.page import page_files
from tests.support.loopback import LoopbackServer
from tests.support.process import CHAT, STORY, running

ROOT = Path(__file__).parents[1]
EXTRA = "[cpu]" if platform.system() == "Linux" else ""

PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def python(*arguments: object) -> str:
    argv = [sys.executable, *map(str, arguments)]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with wheel and sdist, built and checked as for a release, and with the tools."""
    folder = tmp_path_factory.mktemp("released")
    # A copy, as setuptools packs what earlier builds have left in the clone.
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("mlx_mtp", "tests"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=skipped)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    python("-m", "venv", folder / "tools")
    tools = folder / "tools" / "bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tools / "python"))
        patch.delenv("PYTHONPATH", raising=False)
        python(*PIP, "install", "build", "twine", "pipx", "uv")
        python("-m", "build", folder / "tree", "--outdir", folder)
        python("-m", "twine", "check", "--strict", *folder.glob("mlx_mtp-*"))
    return folder


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_serves_from_an_empty_environment(released, tmp_path, monkeypatch):
    environment, (wheel,) = tmp_path / "environment", released.glob("*.whl")
    python("-m", "venv", environment)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    python(*PIP, "install", wheel)
    command = environment / "bin" / "mlx-mtp"
    if EXTRA:
        # The advice is right even without an index that has the package.
        done = subprocess.run([command, "generate", "hi"], capture_output=True, text=True)
        advised = re.search(r"pip install '(mlx-mtp\[\w+\])'", done.stderr)
        assert done.returncode == 2 and advised and done.stderr.count("\n") == 1
        python(*PIP, "install", f"mlx-mtp{EXTRA}")
    where = Path(python("-c", "import mlx_mtp; print(mlx_mtp.__file__)").strip()).parent
    assert where.is_relative_to(environment) and (where / "py.typed").exists()
    for path in BUNDLED_MODEL.glob("*.[jms]*"):
        assert path.read_bytes() == (where / "demo" / path.name).read_bytes()
    for name, file in page_files().items():
        assert file.content == (where / "page" / name).read_bytes()
    for words, shown in (("--version", __version__), ("models --memory 16", "Qwen3.5-9B")):
        argv = [command, *words.split()]
        assert shown in subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    # A fixed number of drafts: the policy begins without any.
    with running("--mtp-num-draft-tokens", "2") as server:
        messages = [{"role": "user", "content": STORY}]
        answer = server.post(CHAT, messages=messages, max_tokens=24, temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["timings"]["draft_n_accepted"] > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_pipx_and_uvx_run_the_wheel(released, tmp_path, monkeypatch):
    (wheel,), tools = released.glob("*.whl"), released / "tools" / "bin"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("PIPX_HOME", "PIPX_BIN_DIR", "UV_CACHE_DIR", "UV_TOOL_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    subprocess.run([tools / "pipx", "install", f"{wheel}{EXTRA}"], check=True)
    uvx = [tools / "uvx", "--from", f"mlx-mtp{EXTRA} @ {wheel.as_uri()}", "mlx-mtp"]
    for command in ([tmp_path / "PIPX_BIN_DIR" / "mlx-mtp"], uvx):
        done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
        assert done.stdout == f"mlx-mtp {__version__}\n"
        argv = [*command, "generate", STORY, "--max-tokens", "24"]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        assert len(done.stdout.split()) >= 8


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_sdist_has_the_package_alone(released):
    (wheel,), (sdist,) = released.glob("*.whl"), released.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {each.name.partition("/")[2] for each in file.getmembers() if each.isfile()}
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.startswith("mlx_mtp/")}
    others = {name for name in names if not name.startswith("mlx_mtp.egg-info/")} - packed
    assert packed <= names and others == {
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg")
    }


def add_to_index(folder: Path, name: str, tag: str, *needed: str) -> dict[str, str]:
    """Put an empty wheel into a package index; returns the entry that the formula should have."""
    file = folder / "files" / f"{name}-1.2-{tag}.whl"
    about = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.2"]
    about += [f"Requires-Dist: {each}" for each in needed]
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}-1.2.dist-info/METADATA", "\n".join(about))
        wheel.writestr(f"{name}-1.2.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{name}-1.2.dist-info/RECORD", "")
    page = folder / "simple" / re.sub("[._]", "-", name.lower()) / "index.html"
    page.parent.mkdir(exist_ok=True)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    with page.open("a") as listing:
        listing.write(f'<a href="/files/{file.name}#sha256={sha256}">{file.name}</a>')
    return {"name": page.parent.name, "path": f"/files/{file.name}", "sha256": sha256}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_the_formula_has_the_indexs_wheels_for_the_oldest_macos(tmp_path):
    for name in ("files", "simple"):
        (tmp_path / name).mkdir()
    metal = "cp313-cp313-macosx_{}_0_arm64".replace("313", f"3{sys.version_info.minor}")
    entries = [
        add_to_index(tmp_path, "mlx_mtp", "py3-none-any", "mlx", "Ruamel.yaml; os_name == 'posix'"),
        add_to_index(tmp_path, "mlx", metal.format(14)),
        add_to_index(tmp_path, "Ruamel.yaml", "py3-none-any"),
    ]
    add_to_index(tmp_path, "mlx", metal.format(15))  # a Mac with macOS 14 can't load this
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    with LoopbackServer(partial(Quiet, directory=tmp_path)) as index:
        threading.Thread(target=index.serve_forever, args=(0.02,), daemon=True).start()
        argv = [sys.executable, ROOT / "scripts/homebrew_formula.py", "mlx-mtp==1.2"]
        environment["PIP_INDEX_URL"] = f"{index.url}/simple"
        formula = subprocess.run(argv, env=environment, capture_output=True, text=True)
        index.shutdown()
    assert formula.returncode == 0, formula.stderr
    own, *resources = re.split(r"^  resource ", formula.stdout, flags=re.MULTILINE)
    listed = dict(re.findall(r'"([a-z-]+)" do\n((?:    .+\n)+)  end\n', "".join(resources)))
    assert list(listed) == ["mlx", "ruamel-yaml"]
    for entry in entries:
        text = listed.get(entry["name"], own)
        assert f'url "{index.url}{entry["path"]}", using: :nounzip\n' in text
        assert f'sha256 "{entry["sha256"]}"\n' in text
    assert 'version "1.2"\n' in own
    # Each Ruby block has its end: inserted text leaves none open.
    lines = formula.stdout.splitlines()
    opened = [line for line in lines if re.search(r"^\s*(class|def)\b|\bdo$", line)]
    assert len(opened) == sum(line.strip() == "end" for line in lines)
    if shutil.which("ruby"):
        subprocess.run(["ruby", "-c"], input=formula.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("mlx", {"url": "https://files/mlx.whl", "archive_info": {}}, "mlx is from no index"),
        ("mlx", {"url": "file:///mlx.whl"}, "mlx is from no index that has hashes: file:///mlx"),
        ("a", {"url": "b", "archive_info": {"hashes": {"sha256": "0" * 64}}}, "run this on a Mac"),
    ],
)
def test_no_formula_without_hashes_or_mlx(name, source, error, monkeypatch):
    found = {"metadata": {"name": name, "version": "1"}, "download_info": source}
    report = SimpleNamespace(returncode=0, stdout=json.dumps({"install": [found]}))
    monkeypatch.setattr(homebrew_formula.subprocess, "run", lambda *_, **__: report)
    monkeypatch.setattr(sys, "argv", ["homebrew_formula.py", "mlx-mtp"])
    with pytest.raises(SystemExit, match=error):
        homebrew_formula.main()


def test_a_release_is_started_by_a_person_and_needs_no_secret():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = YAML(typ="safe").load(text)
    assert list(workflow["on"]) == ["workflow_dispatch"] and "secrets." not in text
    jobs = workflow["jobs"]
    rights = {name: job.get("permissions", workflow["permissions"]) for name, job in jobs.items()}
    assert rights.pop("publish") == {"id-token": "write"}
    assert all(right == {"contents": "read"} for right in rights.values())
    assert [job.get("needs") for job in jobs.values()] == [None, "build", "try", "publish"]
