"""Where a model's files are: the bundled demo, a local directory, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mlx_mtp.console import say_wrapped, size_text
from mlx_mtp.errors import ModelError
from mlx_mtp.models.download import cache_directory, check_content, fetch, missing_bytes
from mlx_mtp.models.files import check_directory

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "demo"

# No Python files: no code of a checkpoint is executed.
_WEIGHTS = "model*.safetensors"
_SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
_FILES = [*_SMALL_FILES, _WEIGHTS, "mtp*.safetensors"]
_PATIENCE_SECONDS = 10
_unreachable = ""  # why the hub can't be reached; empty until that is known
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def resolve_model(name_or_path: str | None, revision: str | None = None) -> Path:
    """Returns the directory of a model, downloaded if it is a hub id; None is the bundled model.

    `revision` is a hub id's branch, tag or commit. Raises ModelError.
    """
    if name_or_path is None:
        return BUNDLED_MODEL
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return check_directory(path)
    if path.exists():
        raise ModelError(f"{name_or_path} is a file; give the directory that holds the model.")
    if not HUB_ID.fullmatch(name_or_path):
        raise ModelError(
            f"{name_or_path!r} is neither an existing directory nor a hub id of the form "
            "organisation/name."
        )
    cached = cached_model(name_or_path, revision)
    return check_directory(cached or download_model(name_or_path, revision))


def cached_model(repo_id: str, revision: str | None = None) -> Path | None:
    """Returns a model's directory in the cache, or None if files are missing.

    The hub isn't asked.
    """
    if not cache_directory(repo_id).exists():
        return None
    # Imported in functions only: the import is slow, and a local model doesn't need it.
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    with contextlib.suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        files = get_cached_repo_tree(repo_id, revision=revision)
        which = {"revision": revision, "allow_patterns": _FILES}
        path = Path(snapshot_download(repo_id, local_files_only=True, **which))
        if all((path / file.path).is_file() for file in files if _matches(file.path, _FILES)):
            return path
    return None


def download_model(repo_id: str, revision: str | None = None) -> Path:
    """Download what the cache lacks of a model's newest version; returns its directory there."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    use_cache_if_offline()
    with explained(repo_id, repo_id, ModelError, revision):
        if not constants.HF_HUB_OFFLINE:
            commit, files = "", []
            with contextlib.suppress(HfHubHTTPError):  # `snapshot_download` below fails as well.
                commit = str(HfApi().model_info(repo_id, revision=revision or "main").sha)
                files = [each for each in _listed(repo_id, commit) if _matches(each.path, _FILES)]
            if size := missing_bytes(repo_id, files):
                place = cache_directory(repo_id)
                say_wrapped(
                    f"Downloading {repo_id}, {size_text(size)}, to {place}", file=sys.stderr
                )
            # Small files come first: an interrupted download can then be recognised as a model.
            for patterns in (_SMALL_FILES, _FILES) if files else ():
                fetch(repo_id, commit, [each for each in files if _matches(each.path, patterns)])
                link = {"allow_patterns": patterns, "tqdm_class": _NoBar}
                snapshot_download(repo_id, revision=commit, **link)
        which = {"revision": revision, "allow_patterns": _FILES, "tqdm_class": _NoBar}
        return Path(snapshot_download(repo_id, **which))


def fetch_files(repo_id: str, commit: str, names: Container[str]) -> None:
    """Download files of a repository into the cache; raises what `fetch` raises."""
    files = _listed(repo_id, commit)
    fetch(repo_id, commit, [file for file in files if file.path in names])


def cached_file(repo_id: str, name: str, revision: str | None) -> Path:
    """Returns a file's path in the cache, downloading it if needed; raises what `fetch` raises.

    A file that `fetch_files` has downloaded is only linked.
    """
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repo_id, name, revision=revision, tqdm_class=_NoBar))
    blob = path.resolve()
    if path.suffix != ".safetensors":  # `fetch` has checked those; hashing them takes long.
        try:
            check_content(blob, blob.name, name)
        except ModelError:
            path.unlink(missing_ok=True)
            raise
    return path


def repository_size(repo_id: str) -> int | None:
    """Returns the bytes of a repository's weights; 0 without such a repository, None if unknown."""
    from huggingface_hub.errors import RepositoryNotFoundError

    use_cache_if_offline()
    try:
        files = _listed(repo_id, "main")
    except RepositoryNotFoundError:
        return 0
    except Exception:  # The error depends on the hub's HTTP client.
        return None
    return sum(file.size for file in files if fnmatch.fnmatch(file.path, _WEIGHTS)) or None


def weights_size(path: Path) -> int:
    """Returns the bytes of model*.safetensors in a directory; a head's sidecar isn't counted."""
    return sum(file.stat().st_size for file in path.glob(_WEIGHTS))


def _listed(repo_id: str, revision: str) -> list[RepoFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(repo_id, recursive=True, revision=revision)
    return [entry for entry in entries if isinstance(entry, RepoFile)]


def _matches(name: str, patterns: list[str]) -> bool:
    # As in huggingface_hub, where * also matches slashes.
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


class _NoBar(tqdm):
    """Hides huggingface_hub's progress bars, which would stay empty: `fetch` shows its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})


def use_cache_if_offline() -> None:
    """Check whether the hub can be reached; if not, only the cache is used from now on.

    huggingface_hub would ask six times for each file, which takes half a minute.
    """
    global _unreachable
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
        except Exception as error:  # Whatever its HTTP client raises.
            _unreachable = f"{constants.ENDPOINT}: {_first_line(error)}"
            constants.HF_HUB_OFFLINE = True


@contextlib.contextmanager
def explained(
    repo: str, what: str, error_class: type[ModelError], revision: str | None = None
) -> Iterator[None]:
    """Turn exceptions into an explanatory `error_class` while `what` is downloaded from `repo`."""
    from huggingface_hub import errors

    try:
        yield
    except error_class:
        raise
    except errors.GatedRepoError as error:
        raise error_class(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise error_class(
            f"There is no local directory {repo}, and the hub has no such model that you may see. "
            "Check the spelling; for a private model, `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise error_class(f"{repo} has no revision {revision!r}.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise error_class(
            f"{what} is not, or not completely, in the local cache, and the hub can't be reached: "
            f"{_unreachable or _first_line(error.__cause__) or 'HF_HUB_OFFLINE is set'}"
        ) from error
    except Exception as error:
        # Whatever else the download's HTTP client or the disk raises is not a bug of ours.
        raise error_class(f"{what} could not be downloaded: {_first_line(error)}") from error


def _first_line(error: BaseException | None) -> str:
    return str(error or "").partition("\n")[0]
