"""Keeps the libraries from talking over the run: what matters is said by us, once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings

from dslaunch.core.verbosity import VERBOSE, verbosity


def quiet_libraries() -> None:
    """No progress bars, no info lines, no deprecation warnings of transformers, peft and DeepSpeed.

    Errors of theirs still show. ``-v`` (``DSLAUNCH_VERBOSE=1``) leaves everything as it is.
    """
    if verbosity() == VERBOSE:
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    # DeepSpeed sets its logger's level and warns while it is imported; a filter outlives that.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("peft", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def stdout_is_data() -> contextlib.AbstractContextManager[object]:
    """While it lasts, what libraries print goes to stderr: stdout holds what the user asked for."""
    return contextlib.redirect_stdout(sys.stderr)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
