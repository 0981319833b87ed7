"""The config that is used if the user passes none, or passes TensorFlow's config."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.core.arguments import check_grace
from tfpreempt.core.replay import read_replay
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.watcher import FindSources, NoticeSourceConfig
from tfpreempt.platforms import metadata_probe
from tfpreempt.platforms.config import (
    FIELDS,
    GenericTerminationConfig,
    TerminationConfig,
)
from tfpreempt.platforms.detect import (
    LocalFindings,
    find_cloud,
    read_local,
)

_logger = logging.getLogger(__name__)

LIMIT_SECONDS = 2.0
"""Timeout for the metadata servers. Even a busy server answers within 1 s. Training
continues during the wait."""

SCHEDULERS = frozenset({"slurm", "kubernetes"})
"""Platforms for which the notices of the machine's cloud are watched, too."""


def resolve_config(
    value: Any,
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> TerminationConfig:
    """Returns the TerminationConfig for the user's argument `termination_config`.

    The function contacts no metadata server. If servers should be contacted, the
    config's `_source_finder` returns a function that does so.

    In a replay the result is a config that watches SIGTERM only, and exits without a
    call of `exit_fn` or of the platform: the exit of a replay is no end of the run.

    Args:
        value: the user's argument. A TerminationConfig is returned unchanged. For None
            the platform is detected. For a
            `tf.distribute.experimental.TerminationConfig` (recognized by its four
            attributes) the platform is detected, too, and its arguments are used.
        environment: environment variables; by default os.environ.
        root: directory that contains `sys`; for tests.

    Raises:
        ConfigurationError: the value has another type, or a variable is invalid.
    """
    is_replay = read_replay() is not None
    if isinstance(value, TerminationConfig):
        return GenericTerminationConfig(save_fn=value.save_fn) if is_replay else value
    # Refuse a class, which has these attributes as properties.
    is_class = isinstance(value, type)
    if value is not None and (
        is_class or not all(hasattr(value, name) for name in FIELDS)
    ):
        raise ConfigurationError(
            f"termination_config is {value!r}; expected a tfpreempt.TerminationConfig "
            "(or a variant), a tf.distribute.experimental.TerminationConfig, or None"
        )
    given = {} if value is None else {name: getattr(value, name) for name in FIELDS}
    options = {name: each for name, each in given.items() if each is not None}
    if is_replay:
        return GenericTerminationConfig(save_fn=options.get("save_fn"))
    found = read_local(environment, root)
    platform = found.platform
    # True if the machine is in a cloud, or if a metadata server may identify a cloud.
    may_be_cloud = found.machine.cloud is not None or bool(found.to_ask)
    if may_be_cloud and (platform is None or platform.name in SCHEDULERS):
        detected = DetectedTerminationConfig(found, **options)
        name = found.machine.cloud or "generic"
        evidence = found.machine.evidence
        if platform is not None:
            name, evidence = platform.name, platform.evidence
        _log_platform(name, evidence, detected._notice_sources(), asks=True)
        return detected
    if platform is None:
        platform = find_cloud(found, {}, 0.0)
    config = platform.config_class(**options)
    _log_platform(platform.name, platform.evidence, config._notice_sources())
    return config


class DetectedTerminationConfig(TerminationConfig):
    """Config of a machine that is in a cloud, or may be in a cloud.

    SIGTERM is watched from the start. Later a thread asks the metadata server for the
    kind of machine, and adds the sources of the cloud's notices.

    The process exits with code 143, after which all clouds, and the supported
    schedulers, restart the program. After SIGTERM the grace period of the scheduler is
    used. Without a scheduler the grace period after SIGTERM is unknown, because the
    signal may come from a shutdown, a container engine or a user.

    Args:
        found: result of `read_local`.
        **options: arguments of TensorFlow's config. `grace_period` is also an upper
            limit for the grace periods of the cloud's notices.

    Raises:
        ConfigurationError: an argument or an environment variable is invalid.
    """

    def __init__(self, found: LocalFindings, **options: Any) -> None:
        scheduler = found.platform
        variant = (
            GenericTerminationConfig if scheduler is None else scheduler.config_class
        )
        self._limit = check_grace(options.get("grace_period"))
        self._is_limited = "grace_period" in options
        super().__init__(
            **{**options, "grace_period": variant(**options).grace_seconds}
        )
        self._found = found

    def _source_finder(self) -> FindSources:
        return self._ask_server

    def _ask_server(self) -> Sequence[NoticeSourceConfig]:
        """Contacts the metadata servers; returns the notice sources of the cloud."""
        cloud = find_cloud(self._found, metadata_probe.PROBES, LIMIT_SECONDS)
        known = {each.source.name for each in self._notice_sources()}
        sources = [
            dataclasses.replace(each, grace_seconds=self._limited(each.grace_seconds))
            for each in cloud.termination_config()._notice_sources()
            if each.source.name not in known
        ]
        wrong = metadata_probe.named_addresses(
            self._found.to_ask, self._found.environment
        )
        if cloud.cloud is None and wrong:
            _log_once(
                f"{', '.join(wrong)}: no metadata server of a cloud answered at this "
                f"address within {LIMIT_SECONDS:g} s, so no notices of a cloud are "
                "watched. Set the variable to the host of the server, or unset the "
                "variable",
                logging.WARNING,
            )
        name, evidence = cloud.name, cloud.evidence
        if (scheduler := self._found.platform) is not None:
            name = f"{scheduler.name} on {cloud.name}"
            evidence = tuple(dict.fromkeys((*scheduler.evidence, *cloud.evidence)))
        # Without a known cloud, the line logged at the start is still correct.
        if cloud.cloud is not None:
            _log_platform(name, evidence, (*self._notice_sources(), *sources))
        return sources

    def _limited(self, grace: float | None) -> float | None:
        if not self._is_limited:
            return grace
        if grace is None or self._limit is None:
            return None
        return min(grace, self._limit)


def _log_platform(
    name: str,
    evidence: Sequence[str],
    sources: Sequence[NoticeSourceConfig],
    *,
    asks: bool = False,
) -> None:
    """Logs a line with the platform, the evidence and the watched sources.

    Args:
        name: name of the platform.
        evidence: facts that show the platform.
        sources: the watched sources of notices.
        asks: whether metadata servers will be asked; a second line may follow.
    """
    texts = [
        f"{each.source.name} ({each.grace_seconds:g} s)"
        if each.grace_seconds
        else f"{each.source.name} (grace period unknown)"
        for each in sources
    ]
    why = f" ({'; '.join(evidence)})" if evidence else ""
    so_far = (
        "no metadata server of a cloud has answered yet; until then notices come from"
    )
    watches = so_far if asks else "watches"
    _log_once(f"platform {name}{why}; {watches} {', '.join(texts)}")


@functools.cache
def _log_once(text: str, level: int = logging.INFO) -> None:
    """Logs a line once per process, even if the program creates several handlers."""
    _logger.log(level, text)
