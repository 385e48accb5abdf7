#!/usr/bin/env python
"""Print the Homebrew formula of a release: python scripts/homebrew_formula.py mlx-mtp==0.1.0

Run this on a Mac with the Python that the formula will use. The formula lists the wheels that pip
would install from the package index, with the index's hashes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile

# The oldest macOS that mlx has wheels for, as pip and Homebrew call it.
PLATFORM, MACOS = "macosx_14_0_arm64", "sonoma"
PYTHON = "{}.{}".format(*sys.version_info)

FORMULA = """\
# Made by scripts/homebrew_formula.py.
class MlxMtp < Formula
  desc "Model server for Apple silicon with multi-token prediction"
  homepage "https://pypi.org/project/mlx-mtp/"
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :{macos}
  depends_on "python@{python}"

  # Wheels have no room in their headers for Homebrew's long paths.
  preserve_rpath

{resources}
  def install
    resources.each {{ |resource| resource.stage(buildpath) }}
    system Formula["python@{python}"].opt_bin/"python{python}", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-deps", "--no-index", *Dir["*.whl"]
    bin.install_symlink libexec/"bin/mlx-mtp"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/mlx-mtp --version")
  end
end
"""
RESOURCE = """\
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
"""


def wheels(requirement: str) -> dict[str, dict[str, str]]:
    """Returns name, version, url and sha256 of each wheel that pip would install, by its name."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    tags = ["--only-binary=:all:", f"--platform={PLATFORM}", f"--target={tempfile.gettempdir()}"]
    done = subprocess.run([*pip, *tags, "--report=-", requirement], stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit("pip finds no wheels for all that is needed.")
    found = {}
    for each in json.loads(done.stdout)["install"]:
        name = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower()
        source = each["download_info"]
        sha256 = source.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if not re.fullmatch("[0-9a-f]{64}", sha256) or source["url"].startswith("file:"):
            raise SystemExit(f"{name} is from no index that has hashes: {source['url']}")
        about = {"name": name, "version": each["metadata"]["version"]}
        found[name] = about | {"url": source["url"], "sha256": sha256}
    return found


def main() -> None:
    """Print the formula."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirement", help="the release, such as mlx-mtp==0.1.0")
    found = wheels(parser.parse_args().requirement)
    if "mlx" not in found:
        raise SystemExit("mlx is not among the packages: run this on a Mac with Apple silicon.")
    own = found.pop("mlx-mtp")
    resources = "\n".join(RESOURCE.format(**found[name]) for name in sorted(found))
    print(FORMULA.format(**own, macos=MACOS, python=PYTHON, resources=resources), end="")


if __name__ == "__main__":
    main()
