"""Hydra's composition, done many times quickly: the one door to its loader.

Hydra composes its own configuration (logging, launcher, directories) again with every cell: 130 ms each. A cell needs
none of it, so it is composed once, and cells that share their group choices share one composition.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathElement
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gradbench.config import CONF, UserError, register
from gradbench.sweep.slurm.conf import register as register_slurm
from gradbench.sweep.values import expected

VERSION_BASE = "1.3"
LAUNCHER, AUTO = "hydra/launcher", "auto"
SWEEPER = "hydra/sweeper=grid"


KINDS = ("images", "masked_text", "causal_text", "captions")
"""What samples can be: the functions of `gradbench.data` that make them."""


class DoesNotApply(Exception):
    """An override does not go with this cell's choices: they have no such `key`, or `why` says it in a sentence."""

    def __init__(self, key: str, why: str | None = None, line: str | None = None) -> None:
        """Remember the key, and the override as it was written."""
        super().__init__(key)
        self.key, self.why, self.line = key, why, line or key


class Composer:
    """Compose cells from overrides over gradbench's YAML files and any further folders of the user's."""

    def __init__(self, config_dirs: Sequence[str] = ()) -> None:
        """Read nothing yet; `config_dirs` are searched after gradbench's own."""
        register()
        register_slurm()
        version.setbase(VERSION_BASE)  # as hydra.main(version_base=...) does
        Plugins.instance()
        path = create_config_search_path(str(CONF))
        for folder in config_dirs:
            if not Path(folder).is_dir():
                raise UserError(f"--config-dir={folder}: no such folder")
            # Hydra wants the source of structured configs, the frame, to be the last.
            path.get_path().insert(-1, SearchPathElement("user", f"file://{Path(folder).absolute()}"))
        self.folders = [CONF, *map(Path, config_dirs)]
        self._loader = ConfigLoaderImpl(path)
        self._loader.repository = CachingConfigRepository(self._loader.repository)  # type: ignore[assignment]
        self._parser = OverridesParser.create(config_loader=self._loader)
        self._defaults: dict[tuple[str, ...], dict[str, Any]] = {}
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Return the parsed overrides."""
        try:
            return self._parser.parse_overrides(list(overrides))
        except OverrideParseException as error:
            raise UserError(f"{error.override}: not an override; write key=value") from error

    def hydra(self, overrides: Sequence[str], auto: Callable[[], str]) -> DictConfig:
        """Return Hydra's own node (launcher, sweeper) for overrides of `hydra...` keys.

        `auto` is asked which launcher to take where the user leaves it open.
        """
        self._check_choices(self.parse(overrides))
        chosen = dict(override.split("=", 1) for override in overrides if override.startswith(f"{LAUNCHER}="))
        words = [override for override in overrides if not override.startswith(f"{LAUNCHER}=")]
        sweeper = [] if any(word.startswith("hydra/sweeper=") for word in words) else [SWEEPER]
        launcher = chosen.get(LAUNCHER, AUTO)
        launcher = auto() if launcher == AUTO else launcher
        try:
            words = [f"{LAUNCHER}={launcher}", *sweeper, *words]
            composed = self._loader.load_configuration("config", words, RunMode.RUN)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(self._about_hydra(words, error)) from error
        hydra: DictConfig = composed.hydra
        return hydra

    def _about_hydra(self, words: Sequence[str], error: BaseException) -> str:
        """Return one line about what is wrong with Hydra's own keys; `words` begin with the launcher."""
        keys = [word.split("=")[0].lstrip("+") for word in words[1:]]
        node: Any = self._loader.load_configuration("config", [words[0], SWEEPER], RunMode.RUN).hydra.launcher
        for key in keys:
            name = key.removeprefix("hydra.launcher.")
            if name != key and name.split(".")[0] not in node:
                near = difflib.get_close_matches(name, list(node), n=1)
                guess = f"; did you mean {near[0]}?" if near else ""
                return f"{key}: no such key of {words[0]}{guess}"
        return one_line(error)

    def is_group(self, key: str) -> bool:
        """Tell whether `key` names a config group."""
        return bool(self._loader.repository.group_exists(key))

    def choices(self, group: str) -> list[str]:
        """Return the choices of a group that `glob(*)` sees: YAML files, auxiliary ones (`_name.yaml`) left out.

        Hydra's own launchers and sweepers are none of them: they would run cells without gradbench's outcomes.
        """
        options = self._loader.repository.get_group_options(group, ObjectType.CONFIG)
        return sorted(option for option in options if not option.startswith("_") and self._is_ours(group, option))

    def _is_ours(self, group: str, choice: str) -> bool:
        return any((folder / group / f"{choice}.yaml").is_file() for folder in self.folders)

    def ignored_files(self, group: str) -> list[Path]:
        """Return files of a group that Hydra never reads because of their ending."""
        return [file for folder in self.folders for file in sorted((folder / group).glob("*.yml"))]

    def check_choices(self, overrides: Sequence[str]) -> None:
        """Raise `UserError` for a choice that a group does not have."""
        self._check_choices([override for override in self.parse(overrides) if not override.is_sweep_override()])

    def cell(self, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the resolved config of one cell as plain data, and the choice made of every group.

        Raises:
            DoesNotApply: an override does not go with these choices.
            UserError: anything else that is wrong with the overrides.
        """
        parsed = self.parse(overrides)
        groups = [override for override in parsed if self._chooses(override)]
        base, chosen = self._base(groups)
        self._check_data(groups)
        config = copy.deepcopy(base)
        for override in parsed:
            if not self._chooses(override):
                self._apply(override, config)
        try:
            return OmegaConf.to_container(config, resolve=True, throw_on_missing=True), dict(chosen)  # type: ignore[return-value]
        except OmegaConfBaseException as error:
            raise UserError(one_line(error)) from error

    def defaults(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the resolved config of the choices among `overrides`, without the values."""
        groups = [override for override in self.parse(overrides) if self._chooses(override)]
        key = tuple(override.input_line or "" for override in groups)
        if key not in self._defaults:
            self._defaults[key] = OmegaConf.to_container(self._base(groups)[0], resolve=True)  # type: ignore[assignment]
        return self._defaults[key]

    def _check_data(self, groups: list[Override]) -> None:
        """Refuse data of another kind than those that a model of ours names as its own."""
        others = [override for override in groups if override.key_or_group != "data"]
        if len(others) == len(groups):
            return
        (given, chosen), (own, own_chosen) = self._base(groups), self._base(others)
        kind, model = _kind(given), chosen["model"]
        if kind in KINDS and kind != _kind(own) and (CONF / "model" / f"{model}.yaml").is_file():
            why = f"data={chosen['data']} does not go with model={model}, which takes {own_chosen['data']}"
            raise DoesNotApply("data", why)

    def _chooses(self, override: Override) -> bool:
        return self.is_group(override.key_or_group)

    def _base(self, groups: list[Override]) -> tuple[DictConfig, dict[str, str]]:
        key = tuple(override.input_line or "" for override in groups)
        if key not in self._bases:
            self._check_choices(groups)
            try:
                self._bases[key] = self._compose(groups)
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                raise UserError(f"{' '.join(key)}: {one_line(error)}") from error
        return self._bases[key]

    def _compose(self, groups: list[Override]) -> tuple[DictConfig, dict[str, str]]:
        repository = self._loader.repository
        defaults = create_defaults_list(
            repo=repository, config_name="config", overrides_list=groups, prepend_hydra=False, skip_missing=False
        )
        config = self._loader._compose_config_from_defaults_list(defaults=defaults.defaults, repo=repository)
        _let_model_ask(config)
        OmegaConf.set_struct(config, True)
        return config, {group: choice or "null" for group, choice in defaults.overrides.known_choices.items()}

    def _check_choices(self, groups: list[Override]) -> None:
        for override in groups:
            group, value = override.key_or_group, override.value()
            if override.is_delete() or not self.is_group(group):
                continue
            if not isinstance(value, str | QuotedString):
                raise UserError(
                    f"{override.input_line}: takes the name of a choice ({', '.join(self.choices(group))}); "
                    f"one of its keys is {group}.key=value"
                )
            value = str(value)
            if not self._is_ours(group, value):
                raise UserError(self._unknown(group, value))

    def _unknown(self, group: str, value: str) -> str:
        choices = self.choices(group)
        near = difflib.get_close_matches(value, choices, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        unread = [
            f"; {file} is not read: rename it to .yaml" for file in self.ignored_files(group) if file.stem == value
        ]
        return f"{group}={value}: unknown {group.split('/')[-1]}; allowed: {', '.join(choices)}{guess}{''.join(unread)}"

    def _apply(self, override: Override, config: DictConfig) -> None:
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except ConfigCompositionException as error:
            if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
                raise DoesNotApply(override.key_or_group, line=override.input_line) from error
            raise UserError(f"{override.input_line}: {_refusal(override, error)}") from error
        except ValueError as error:  # a name where a list takes a number
            raise UserError(f"{override.input_line}: {one_line(error)}") from error


def _kind(config: DictConfig) -> str | None:
    """Return what the samples of our own data are."""
    module, _, kind = str(config.data.get("_target_")).rpartition(".")
    return kind if module.startswith("gradbench.data.") else None


def _let_model_ask(config: DictConfig) -> None:
    """Move what a model's YAML says under `resources` to where overrides find it: no part of what the model is."""
    if "resources" in config.get("model", {}):
        OmegaConf.set_struct(config, False)
        config.resources = OmegaConf.merge(config.resources, config.model.pop("resources"))


def _refusal(override: Override, error: ConfigCompositionException) -> str:
    """Return why a key that there is does not take its override."""
    takes = expected(override.key_or_group)
    if takes is None:
        return _cause(error)
    return "cannot be left out" if override.is_delete() else f"must be {takes}"


def _cause(error: BaseException) -> str:
    return one_line(error.__cause__ or error)


def one_line(error: BaseException) -> str:
    """Return the first sentence of an error: Hydra and OmegaConf put paths and types on the lines behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
