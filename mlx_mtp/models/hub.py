"""Where a model's files are: the bundled demo, a local directory, or the Hugging Face hub."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from mlx_mtp.errors import ModelError
from mlx_mtp.models.files import check_directory
from mlx_mtp.progress import Bar

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "demo"

# No Python files: nothing that a checkpoint brings is executed.
_FILES = ["*.json", "model*.safetensors", "mtp*.safetensors", "*.jinja", "*.txt"]
_PATIENCE_SECONDS = 10
_unreachable = ""  # why the hub can't be reached, once that is known
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def resolve_model(name_or_path: str | None, revision: str | None = None) -> Path:
    """The directory of a model, downloaded if it is a hub id; None is the bundled one.

    `revision` is a hub id's branch, tag or commit.
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
    # Imported here: it takes a while, and a local model doesn't need it.
    from huggingface_hub import snapshot_download

    use_cache_if_offline()
    with explained(name_or_path, name_or_path, ModelError, revision):
        options = {"revision": revision, "allow_patterns": _FILES, "tqdm_class": Bar}
        path = Path(snapshot_download(name_or_path, **options))
    return check_directory(path)


def use_cache_if_offline() -> None:
    """Look whether the hub can be reached; if not, only the cache is used from now on.

    huggingface_hub would ask for each file six times, in half a minute.
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
    """Raise `error_class` with an explanation, while `what` is downloaded of `repo`."""
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
        # Whatever else the download's HTTP client or the disk raises is no bug of ours.
        raise error_class(f"{what} could not be downloaded: {_first_line(error)}") from error


def _first_line(error: BaseException | None) -> str:
    return str(error or "").partition("\n")[0]
