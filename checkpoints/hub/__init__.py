"""Models by name from the Hugging Face Hub: "user/repo[:quant]" -> files in the cache that programs share."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import CheckpointError
from ..gguf import part_paths
from . import cache, download, names
from .names import is_address, is_hub_name

__all__ = ["fetch", "is_address", "is_hub_name"]


def fetch(source: str, *, offline: bool = False, check: bool = False) -> Path:
    """The local path of "user/repo[:quant]", downloaded if it is not in the cache: a GGUF file or a folder.

    An address of a repository or of a file on the Hub does as well (names.parse). `quant` picks among a
    repository's GGUF files by a word of their names ("q4_k_m" finds "x-Q4_K_M.gguf"); all parts of a split
    file are fetched. A repository without GGUF files is fetched as a Hugging Face folder.
    An interrupted download continues where it stopped. A file with another size or hash than the Hub
    lists is deleted; `check` also reads the files that are in the cache already. `offline`, or
    HF_HUB_OFFLINE=1, uses the cache only. HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_ENDPOINT are read at each
    call. Raises CheckpointError if there is no such repository or file, if several match, if a file is not
    the one that the Hub lists, or if the Hub cannot be reached.
    """
    repo, quant = names.parse(source)
    if offline or _is_true("HF_HUB_OFFLINE") or _is_true("TRANSFORMERS_OFFLINE"):
        return _cached(source, repo, quant)
    with _one_line(source, repo, quant), _quiet():  # the first imports huggingface_hub, which sets its logger
        commit, files = download.listing(repo)
        by_name = {file.name: file for file in files}
        is_folder = quant is None and not names.models(by_name)
        if is_folder:
            chosen = names.folder_files(by_name)
            if "config.json" not in chosen:
                raise CheckpointError(f"{source}: the repository has no GGUF file and no config.json")
        else:
            chosen = names.choose(source, {name: file.size for name, file in by_name.items()})
        paths = download.download(repo, commit, [by_name[name] for name in chosen], check=check)
    return paths[0].parent if is_folder else paths[0]


def _cached(source: str, repo: str, quant: str | None) -> Path:
    """The path of "user/repo[:quant]" in the cache, with the newest version of each file."""
    remedy = f"fetch it once with a connection: bonsai-jax pull {source}"
    snapshots = cache.snapshots(repo)
    if not snapshots:
        raise CheckpointError(f"{source}: not in the cache, and offline; {remedy}")
    paths: dict[str, Path] = {}
    for snapshot in snapshots:
        for name in cache.file_names(snapshot):
            paths.setdefault(name, snapshot / name)
    if names.models(paths):
        first = paths[names.choose(source, {name: path.stat().st_size for name, path in paths.items()})[0]]
        for path in part_paths(first):
            if not path.is_file():
                raise CheckpointError(f"{source}: {path.name} is not in the cache, and offline; {remedy}")
        return part_paths(first)[0]
    if quant is not None:
        raise CheckpointError(f"{source}: the cache holds no GGUF file of it, and offline; {remedy}")
    if "config.json" not in paths:
        raise CheckpointError(
            f"{source}: the cache holds neither a GGUF file nor config.json of it; {remedy}"
        )
    return paths["config.json"].parent


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences huggingface_hub's warnings (no token, retries, locks): failures become errors of ours."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if level in (logging.NOTSET, logging.WARNING):
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_line(source: str, repo: str, quant: str | None) -> Iterator[None]:
    """Turns errors of the network and of huggingface_hub into CheckpointErrors with a remedy."""
    try:
        from huggingface_hub import errors, get_token
    except ModuleNotFoundError as e:
        raise CheckpointError(
            f"{source}: names a model on the Hub, which takes the package {e.name}; install it"
        ) from e
    login = "set HF_TOKEN or run `hf auth login`"
    absent = f"no such file, and no such repository on the Hub (or a private one: {login})"
    try:
        yield
    except errors.GatedRepoError as e:
        page = f"{download.endpoint()}/{repo}"
        raise CheckpointError(f"{source}: gated; ask for access on {page}, then {login}") from e
    except errors.RepositoryNotFoundError as e:
        raise CheckpointError(f"{source}: {absent}") from e
    except errors.HfHubHTTPError as e:
        status = e.response.status_code
        if status == 401:
            why = f"the Hub refuses the token; {login} again" if get_token() else absent
        elif status == 403:
            why = f"the token may not read {repo} (403); give it that right, or another one: {login}"
        elif status == 429:
            wait = f"in {s:.0f} s" if (s := download.retry_after(e)) else "later"
            why = f"too many requests (429); try again {wait}, a token raises the limit: {login}"
        else:
            path = e.response.url.path
            why = f"the Hub answers {status} for {path}; {_or_offline(source, repo, quant)}"
        raise CheckpointError(f"{source}: {why}") from e
    except download.Stopped as e:
        raise CheckpointError(f"{source}: {e}; run it again to continue there") from e
    # HTTPError: the base of what its HTTP library raises.
    except (errors.HTTPError, OSError) as e:
        if isinstance(e, OSError) and e.strerror and not isinstance(e, (ConnectionError, TimeoutError)):
            place = e.filename or cache.folder()
            raise CheckpointError(f"{source}: {place}: {e.strerror}; HF_HOME sets another folder") from e
        raise CheckpointError(
            f"{source}: {download.endpoint()} cannot be reached: {download.reason(e)}; "
            f"{_or_offline(source, repo, quant)}"
        ) from e


def _or_offline(source: str, repo: str, quant: str | None) -> str:
    try:
        _cached(source, repo, quant)
    except CheckpointError:
        return "try again later"
    return "the cache has it: --offline (in Python offline=True) opens that"
