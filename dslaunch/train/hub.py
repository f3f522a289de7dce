"""Whether the hub has a model and can be reached: asked once, before libraries try for a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dslaunch.core.errors import ConfigError, EnvironmentNotReady, one_line

_TIMEOUT_S = 20.0
# Names of what http clients and huggingface_hub raise where no answer came, in any of their versions.
_NO_ANSWER = {
    "ConnectionError",
    "TransportError",
    "TimeoutError",
    "gaierror",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
}


def check_hub_model(name: str, revision: str | None) -> None:
    """Raise where the hub id ``name`` can be had neither from the cache nor from the hub.

    Raises ConfigError where the hub does not have it, or not for this user;
    EnvironmentNotReady where it gives no answer.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if Path(name).is_dir():
        return
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
    except GatedRepoError:
        hint = "ask for access on its page, and set HF_TOKEN (launch: --env HF_TOKEN)"
        raise ConfigError(f"the hub gives {name} only to users that were granted access", hint=hint) from None
    except (HFValidationError, RepositoryNotFoundError):
        hint = "check the name; a private one needs HF_TOKEN"
        raise ConfigError(f"{name} is no directory here, and the hub has no such model", hint=hint) from None
    except RevisionNotFoundError:
        raise ConfigError(f"the hub has no revision {revision!r} of {name}") from None
    except Exception as error:  # a mirror may know other answers: loading will tell
        if has_no_answer(error):
            raise no_answer(name, error) from None


def has_no_answer(error: BaseException) -> bool:
    """Whether an error means that the hub could not be asked, not that it said no."""
    return any(kind.__name__ in _NO_ANSWER for each in _chain(error) for kind in type(each).__mro__)


def no_answer(name: str, error: BaseException) -> EnvironmentNotReady:
    """The error to raise where the hub could not be asked for ``name``."""
    *_, first = _chain(error)
    return EnvironmentNotReady(
        f"{name} is no directory here and not in the hub's cache, and the hub gives no answer: "
        f"{one_line(first)}",
        hint=f"on a machine with network: hf download {name}; or give a directory",
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
