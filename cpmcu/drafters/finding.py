"""Finds the draft of a model, checks it against its target and completes its plan."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from cpmcu.config import SpeculativeConfig
from cpmcu.drafters.networks import complete
from cpmcu.drafters.options import DrafterOptions, additions, name_of, options_of
from cpmcu.drafters.registry import (
    Drafter,
    DraftFiles,
    DraftPlan,
    TargetModel,
    find_drafter,
    get_drafter,
    registered_additions,
    registered_drafters,
)
from cpmcu.loading.hub import resolve_model
from cpmcu.loading.model_files import model_files
from cpmcu.models.common import BuildOptions
from cpmcu.models.reader import language_config
from cpmcu.models.registry import find_model
from cpmcu.shipped import shipped_draft
from cpmcu.verification import TARGET_MATCH, is_lossy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft that fits its target. Only headers have been read."""

    method: str  # registered name of the drafter
    plan: DraftPlan  # the complete plan (networks.py)
    files: DraftFiles | None


def find_draft(
    speculation: SpeculativeConfig, directory: Path, target: TargetModel
) -> FoundDraft | None:
    """The configured draft, else the shipped draft of a shipped model, else the target's own head.

    Returns None without a draft. Raises FileNotFoundError for missing files. Raises ValueError, in
    one sentence, for a draft that does not fit its target and for an impossible tree shape.
    """
    source = speculation.draft_model_path
    named = [name for name, needed in speculation.drafters_by_option().items() if needed]
    expected = named[0] if named else speculation.method
    shipped = None
    if not speculation.no_speculation and source is None:
        kind = expected if expected == "auto" else get_drafter(expected)[0]
        shipped = shipped_draft(directory, kind)
        if shipped is None and expected == "auto":
            expected = _own_head(directory, target, speculation) or expected
    if speculation.no_speculation or (source is None and not shipped and expected == "auto"):
        _check_unused_options(speculation)
        return None
    if shipped:
        source = str(shipped)
    drafter = None if expected == "auto" else get_drafter(expected)[1]
    if source is None and drafter is not None and (needs := getattr(drafter, "needs", None)):
        raise ValueError(f"method {name_of(expected)} needs {needs}")
    files = None if source is None else _open_files(source, shipped is not None)
    if files is None and drafter is not None and _is_in_target(drafter):
        files = _files_of(directory, target)
    try:
        method, drafter = _find(files, expected, speculation)
        plan = drafter.plan(files, target, speculation)
        added = [each for each in registered_additions() if each.is_given(speculation)]
        plan = complete(method, plan, files, target, speculation, is_part=bool(added))
    except ValueError as error:
        if files is None or str(files.directory) in str(error):
            raise
        raise ValueError(f"{files.directory}: {error}") from error
    kinds = [options_of(method)]
    for addition in added:
        method, plan = addition.extend(method, plan, files, speculation)
        kinds += additions()
    _check_options(speculation, method, kinds)
    return FoundDraft(method, plan, files)


def _check_options(
    speculation: SpeculativeConfig, method: str, kinds: list[type[DrafterOptions]]
) -> None:
    """Raises ValueError for an option that neither the drafter nor an addition has."""
    accepted = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    for addition in additions():  # they may have no effect, as in FastDeploy's configurations
        fields = dataclasses.fields(addition)
        accepted |= {field.name for field in fields if not field.metadata["fixes_shape"]}
    for name, value in speculation.options.items():
        if value and name not in accepted:
            raise ValueError(f"{name} is {value!r}, expected none for a draft of kind {method}")


def drafts_by_default(directory: Path) -> bool:
    """Does the model in `directory` have a draft if none is named?"""
    if shipped_draft(directory) is not None:
        return True
    files = model_files(directory)
    config = language_config(files.json("config.json"))
    fields = find_model(config).build(config, BuildOptions())
    target = TargetModel(config, fields, checkpoint=files.checkpoint())
    return _own_head(directory, target, SpeculativeConfig()) is not None


def _is_in_target(drafter: Drafter) -> bool:
    return getattr(drafter, "in_target", False)


def _files_of(directory: Path, target: TargetModel) -> DraftFiles | None:
    """Returns the target's checkpoint as the files of a draft that lies in it."""
    if target.checkpoint is None:
        return None
    return DraftFiles(directory, target.config, target.checkpoint)


def _own_head(directory: Path, target: TargetModel, speculation: SpeculativeConfig) -> str | None:
    """The method of a draft head in the target's checkpoint. Warns if it cannot be used."""
    files = _files_of(directory, target)
    if files is None:
        return None
    for name in registered_drafters():
        _, drafter = get_drafter(name)
        if _is_in_target(drafter) and drafter.matches(files.config, files.tensors):
            try:
                drafter.plan(files, target, speculation)
            except ValueError as error:
                logger.warning("%s: nothing is drafted: %s", directory.name, error)
                return None
            return name
    return None


def _check_unused_options(speculation: SpeculativeConfig) -> None:
    """Warns of options of drafters without a draft. Raises ValueError for a lossy strategy."""
    if speculation.no_speculation:
        return
    if is_lossy(speculation.verify_strategy):
        raise ValueError(
            f"verify_strategy is {speculation.verify_strategy!r}, but there is no draft whose "
            f"tokens it could accept: name one, or expect {TARGET_MATCH!r}"
        )
    idle = list(speculation.options)
    if idle:
        logger.warning("%s has no effect: no draft is given", ", ".join(idle))


def _open_files(model: str, is_default: bool) -> DraftFiles:
    directory = resolve_model(model)
    files = model_files(directory)
    config = language_config(files.json("config.json"))
    if not config:
        raise FileNotFoundError(f"{directory}: has no config.json, expected a draft's directory")
    return DraftFiles(directory, config, files.checkpoint(), is_default)


def _find(
    files: DraftFiles | None, expected: str, speculation: SpeculativeConfig
) -> tuple[str, Drafter]:
    if expected == "auto":
        assert files is not None
        method, drafter = find_drafter(files)
        for option, named in speculation.naming():
            if named == method and not speculation.options[option]:
                raise ValueError(f"the draft is {method}, but {option} is no")
        return method, drafter
    method, drafter = get_drafter(expected)
    if not drafter.has_checkpoint:
        if files is not None:
            raise ValueError(f"method {expected} has no weights, expected no draft_model_path")
        return method, drafter
    if files is None:
        raise ValueError(f"method {expected} needs weights, expected draft_model_path")
    if _is_in_target(drafter):  # its plan says what is missing
        return method, drafter
    return find_drafter(files, method)
