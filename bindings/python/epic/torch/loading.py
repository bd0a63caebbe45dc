# SPDX-License-Identifier: Apache-2.0
"""Loads a model of the transformers package, of whose experts each rank reads only its own.

transformers itself loads all parameters except those of experts, into a model whose experts take no
memory. Then each block of experts becomes a layer of EPIC, which reads its experts from the files
one at a time. So a rank has memory for its own experts, for all other parameters, and for one
expert that it is reading.
"""

import copy
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epic.errors import EpicArgumentError, EpicUnsupportedError
from epic.options import check_kind
from epic.torch.arguments import ROW_TYPES
from epic.torch.experts import GroupedMm
from epic.torch.families import family_of, read_tensor
from epic.torch.groups import Group
from epic.torch.module import EXPERT_WEIGHTS
from epic.torch.pretrained import Block, find_blocks, make_layer, refuse_saving, saving_models

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip
# Options of transformers that from_pretrained refuses. They choose other files, other devices or
# other dtypes for the parameters.
REFUSED = (
    "device_map", "distributed_config", "gguf_file", "ignore_mismatched_sizes", "max_memory",
    "offload_folder", "output_loading_info", "quantization_config", "state_dict", "subfolder",
    "tp_plan", "tp_size", "use_safetensors", "variant",
)  # fmt: skip

# Held while transformers makes or loads a model, because it changes global state meanwhile.
lock = threading.Lock()


# ---------------------------------------------------------------------- checkpoint ----


class Checkpoint:
    """The safetensors files of a folder.

    The constructor reads only the headers of the files.

    Args:
        folder: A folder as save_pretrained writes it.

    Attributes:
        file_of: The file of each tensor, by the tensor's name.

    Raises:
        EpicArgumentError: A file is missing, damaged, or lacks a tensor that the index names.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.opened: dict[Path, Any] = {}
        self.file_of: dict[str, Path] = {}
        index = self.folder / INDEX
        try:
            named = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise EpicArgumentError(
                f"{index} cannot be read ({type(error).__name__}: {error}): must be a JSON file "
                "with a weight_map; write or download the folder again"
            ) from error
        names = sorted(set(named.values())) or [SINGLE]
        for file in [self.folder / name for name in names]:
            if not file.is_file():
                raise EpicArgumentError(
                    f"{file} does not exist: must be a safetensors file; save the model with "
                    "save_pretrained, or download the complete folder"
                )
            self.file_of.update(dict.fromkeys(self.open(file).keys(), file))
        self.close()
        for name, file in named.items():
            if self.file_of.get(name) != self.folder / file:
                raise EpicArgumentError(
                    f"{self.folder / file} does not contain {name}: must contain it, because "
                    f"{INDEX} lists it there; write or download the folder again"
                )

    def open(self, file: Path) -> Any:
        """Return a file, which stays open until close()."""
        from safetensors import SafetensorError, safe_open

        if file not in self.opened:
            try:
                self.opened[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise EpicArgumentError(
                    f"{file} cannot be read ({error}): must be a complete safetensors file"
                ) from error
        return self.opened[file]

    def close(self) -> None:
        """Close the files, so that their pages no longer count as memory of the process."""
        self.opened.clear()

    def tensor(self, name: str) -> Any:
        """Return a slice object of safetensors for a tensor. Indexing it reads that part."""
        return self.open(self.file_of[name]).get_slice(name)

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first tensor of floating point; float32 if there is none."""
        kinds = (self.tensor(name).get_dtype() for name in self.file_of)
        return next((FLOATS[kind] for kind in kinds if kind in FLOATS), torch.float32)


# -------------------------------------------------------------------- names, experts ----


class ExpertSource(NamedTuple):
    """The tensors of a checkpoint from which one parameter of a block's experts is made.

    A checkpoint has either one tensor for all experts, or a tensor for each expert, which
    transformers converts.

    Attributes:
        shape: The shape of the parameter in the model: [num_experts, ...].
        names: For each source pattern of the conversion, the names of the tensors in the order of
            the experts. For one tensor with all experts: {None: [its name]}.
        conversion: The WeightConverter of transformers; None for one tensor with all experts.
    """

    shape: torch.Size
    names: dict[str | None, list[str]]
    conversion: Any


class Names:
    """The names that the tensors of a checkpoint have in a model.

    Args:
        model: The model, on "meta".
        checkpoint: The checkpoint.
        experts: The shape of each parameter of experts, by its name in the model.
        key_mapping: The option key_mapping of transformers, or None.

    Attributes:
        experts: The ExpertSource of each parameter of experts, by its name in the model.
        others: The names in the files of all other tensors.
        in_model: The name in the model of each tensor, by its name in the files.
        used: The conversions of transformers that at least one name needed.

    Raises:
        EpicArgumentError: The checkpoint lacks an expert, or has one of another shape.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, experts: dict[str, torch.Size], key_mapping: Any
    ) -> None:
        # transformers does not document these functions, but they know the layouts of all released
        # checkpoints. The tests pin the version of transformers.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        conversions = get_model_conversion_mapping(model, key_mapping)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        wanted = model.state_dict()
        found: dict[str, dict[str | None, list[str]]] = {name: {} for name in experts}
        self.others: list[str] = []
        self.in_model: dict[str, str] = {}
        for name in sorted(checkpoint.file_of, key=dot_natural_key):
            args = (model.base_model_prefix, wanted)
            target, pattern = rename_source_key(name, renamings, converters, *args)
            if target not in wanted and name in wanted:
                target, pattern = rename_source_key(name, [], [], *args)
            self.in_model[name] = target
            if target in found:
                found[target].setdefault(pattern, []).append(name)
            else:
                self.others.append(name)
        self.experts = {
            name: check_experts(checkpoint, name, shape, found[name], of_pattern)
            for name, shape in experts.items()
        }
        self.used = [c for c in conversions if c.was_used()]


def check_experts(
    checkpoint: Checkpoint,
    target: str,
    shape: torch.Size,
    names: dict[str | None, list[str]],
    of_pattern: dict[str, Any],
) -> ExpertSource:
    """Return the ExpertSource of a parameter of experts.

    Args:
        checkpoint: The checkpoint.
        target: Name of the parameter in the model.
        shape: Shape of the parameter in the model.
        names: As ExpertSource.names.
        of_pattern: The conversion of transformers for each source pattern.

    Raises:
        EpicArgumentError: The checkpoint lacks a tensor, has too many, or has one of another shape.
    """
    if not names:
        raise EpicArgumentError(
            f"{checkpoint.folder} does not contain {target}: must contain it, because the model "
            "has this parameter"
        )
    if None in names:
        (name,) = names[None]
        found = tuple(checkpoint.tensor(name).get_shape())
        if found != shape:
            raise EpicArgumentError(
                f"{name} in {checkpoint.file_of[name]} has the shape {list(found)}: must be "
                f"{list(shape)}, as config.json describes the model"
            )
        return ExpertSource(shape, names, None)
    conversion = of_pattern[next(pattern for pattern in names if pattern is not None)]
    for pattern in conversion.source_patterns:
        check_each_expert(checkpoint, target, shape[0], pattern, names.get(pattern, []))
    return ExpertSource(shape, names, conversion)


def check_each_expert(
    checkpoint: Checkpoint, target: str, count: int, pattern: str, names: list[str]
) -> None:
    """Raise an error if a checkpoint does not have exactly one tensor for each expert.

    Args:
        checkpoint: The checkpoint.
        target: Name of the parameter in the model, for the error.
        count: Number of experts.
        pattern: Source pattern of the conversion, for the error.
        names: The tensors that match the pattern.
    """
    if not names:
        raise EpicArgumentError(
            f"{checkpoint.folder} does not contain {pattern}: must contain it for {target}, "
            "because it contains other parts of this parameter"
        )
    wanted = [name_of_expert(names[0], expert) for expert in range(count)]
    if set(names) == set(wanted):
        return
    for name in wanted:
        if name not in names:
            raise EpicArgumentError(
                f"{checkpoint.folder} does not contain {name}: must contain it, because the model "
                f"has {count} experts"
            )
    extra = next(name for name in names if name not in wanted)
    raise EpicArgumentError(
        f"{extra} in {checkpoint.file_of[extra]} has no place in the model: must be one of {count} "
        "experts, as config.json describes the model"
    )


def name_of_expert(name: str, expert: int) -> str:
    """Return the name of a tensor with another number of the expert.

    This number is the last part of the name that consists of digits.
    """
    steps = name.split(".")
    last = max(i for i, step in enumerate(steps) if step.isdigit())
    return ".".join((*steps[:last], str(expert), *steps[last + 1 :]))


def read_expert(
    checkpoint: Checkpoint, model: Any, target: str, source: ExpertSource, expert: int, dtype: Any
) -> Tensor:
    """Read one expert of a parameter from the files, and convert it to the layout of the block.

    Args:
        checkpoint: The checkpoint.
        model: The model.
        target: Name of the parameter in the model.
        source: The tensors of the parameter.
        expert: Number of the expert.
        dtype: Dtype of the result.

    Returns:
        A tensor with the shape of the parameter, without its first dimension.
    """
    if source.conversion is None:
        (name,) = source.names[None]
        return checkpoint.tensor(name)[expert : expert + 1].to(dtype)[0]
    conversion = copy.deepcopy(source.conversion)
    for pattern, names in source.names.items():
        part = checkpoint.tensor(names[expert])[...].to(dtype)
        conversion.add_tensor(target, names[expert], pattern, part)
    (value,) = conversion.convert(target, model=model, config=model.config).values()
    value = value[0] if isinstance(value, list) else value
    if value.shape != (1, *source.shape[1:]):
        name = next(iter(source.names.values()))[expert]
        raise EpicArgumentError(
            f"{name} in {checkpoint.file_of[name]} makes {target} of the shape "
            f"{list(value.shape[1:])}: must be {list(source.shape[1:])}, as config.json describes "
            "the model"
        )
    return value[0]


# ----------------------------------------------------------------------------- model ----


def make_skeleton(model_class: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Return the model that a folder describes, on the device "meta".

    Args:
        model_class: As for from_pretrained.
        folder: The folder.
        options: The options of from_pretrained. "config", and options that change fields of the
            configuration, are removed from them.
    """
    import transformers

    config = options.pop("config", None)
    if config is None:
        kind = getattr(model_class, "config_class", None) or transformers.AutoConfig
        config = kind.from_pretrained(folder)
        changes = {name: options.pop(name) for name in list(options) if hasattr(config, name)}
        config = kind.from_pretrained(folder, **changes) if changes else config
    if getattr(config, "quantization_config", None) is not None:
        raise EpicUnsupportedError(
            f"{folder} has a quantization_config in config.json: must not be quantized; dequantize "
            "the model with transformers and save it again"
        )
    # The classes AutoModelFor... have from_config; all others are called with the configuration.
    make = getattr(model_class, "from_config", model_class)
    with lock, torch.device("meta"):
        return make(copy.deepcopy(config))


def parameters_of_experts(model: nn.Module, group: Group) -> dict[str, torch.Size]:
    """Return the shape of each parameter of experts, by its name in the model.

    Raises:
        EpicUnsupportedError: replace_moe does not support the model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for *_, block in find_blocks(model, group):
        for key, path in family_of(block).names.items():
            if key in EXPERT_WEIGHTS:
                name = f"{names[id(block)]}.{path}"
                found[name] = model.get_parameter(name).shape
    return found


def without_experts(kind: type, experts: dict[str, torch.Size]) -> type:
    """Return a subclass of a model class, whose parameters of experts have 0 experts.

    Args:
        kind: The class.
        experts: The shape of each parameter of experts, by its name in the model.
    """

    def make(self: Any, *args: Any, **more: Any) -> None:
        kind.__init__(self, *args, **more)  # type: ignore[misc]
        for name in experts:
            set_parameter(self, name, self.get_parameter(name)[:0].detach())

    # Keep name and module of the class, because transformers derives settings from them.
    same = {"__init__": make, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), same)


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter of a model."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(value))


def load_others(
    kind: type,
    config: Any,
    checkpoint: Checkpoint,
    names: Names,
    dtype: torch.dtype,
    strict: bool,
    options: dict[str, Any],
) -> Any:
    """Load a model with all parameters except those of experts.

    Args:
        kind: The class of the model.
        config: Its configuration.
        checkpoint: The checkpoint.
        names: The names of its tensors.
        dtype: Dtype of the parameters.
        strict: As for from_pretrained.
        options: Other options of the from_pretrained of transformers.

    Returns:
        The model, whose parameters of experts have 0 experts.

    Raises:
        EpicArgumentError: As for check_report.
    """
    reduced: Any = without_experts(kind, {n: e.shape for n, e in names.experts.items()})
    state = {name: checkpoint.tensor(name) for name in names.others}
    for name, source in names.experts.items():
        state[name] = torch.empty(0, *source.shape[1:], dtype=dtype)
    more = {**options, "config": config, "dtype": dtype}
    with lock:
        model, report = reduced.from_pretrained(
            None, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True, **more
        )
    check_report(checkpoint, names, kind.__name__, strict, report)
    model.__class__ = kind
    return model


def check_report(
    checkpoint: Checkpoint, names: Names, kind: str, strict: bool, report: dict[str, Any]
) -> None:
    """Raise an error if the tensors of a checkpoint do not fit the model.

    Args:
        checkpoint: The checkpoint.
        names: The names of its tensors.
        kind: Name of the model's class, for errors.
        strict: Whether a tensor that is no parameter of the model is an error.
        report: The loading report of transformers.

    Raises:
        EpicArgumentError: A parameter is missing, has another shape, or is unexpected.
    """
    missing, mismatched, unexpected = (
        sorted(report[key]) for key in ("missing_keys", "mismatched_keys", "unexpected_keys")
    )
    if missing:
        raise EpicArgumentError(
            f"{checkpoint.folder} does not contain {', '.join(missing[:3])}: must contain "
            f"{pronoun_of(missing)}, because {kind} has {pronoun_of(missing)}"
        )
    of_target = {target: name for name, target in names.in_model.items()}
    if mismatched:
        target, found, wanted = mismatched[0]
        name = of_target.get(target, target)
        raise EpicArgumentError(
            f"{name} in {checkpoint.file_of.get(name, checkpoint.folder)} has the shape "
            f"{list(found)}: must be {list(wanted)}, as config.json describes the model"
        )
    if unexpected and strict:
        name = of_target.get(unexpected[0], unexpected[0])
        raise EpicArgumentError(
            f"{name} in {checkpoint.file_of.get(name, checkpoint.folder)} is not a parameter of "
            f"{kind}: must be one, because a parameter that is left out can change the results; "
            "pass the class that config.json names, or strict=False"
        )


def choose_dtype(requested: torch.dtype | str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the parameters, as transformers chooses it.

    requested: "auto", a dtype, or the name of one. "auto" stands for the dtype of the
    configuration, or without one for that of the files.
    """
    found = getattr(config, "dtype", None) if requested == "auto" else requested
    found = getattr(torch, found, None) if isinstance(found, str) else found or checkpoint.dtype()
    if found not in ROW_TYPES:
        raise EpicArgumentError(
            f"dtype is {requested!r}: must be float32, bfloat16, float16 or float64, as a "
            'torch.dtype or its name, or "auto"'
        )
    return found


def fill_layers(
    model: nn.Module,
    group: Group,
    checkpoint: Checkpoint,
    names: Names,
    grouped_mm: GroupedMm | None,
    invariant: bool,
    adapt: Callable[[Any], Any] | None,
) -> Any:
    """Replace the blocks of a model by layers, and read the experts of this rank.

    Args:
        model: The result of load_others.
        group: As for from_pretrained.
        checkpoint: The checkpoint.
        names: The names of its tensors.
        grouped_mm: As for from_pretrained.
        invariant: As for from_pretrained.
        adapt: As for from_pretrained.

    Returns:
        The model, or the result of adapt.
    """
    for name, source in names.experts.items():
        # adapt needs parameters of the full shape. All elements of this one share the memory of one
        # number. It is not on "meta", because peft would then put its adapters on "meta" too.
        value = torch.zeros((), dtype=model.get_parameter(name).dtype, device=group.device)
        set_parameter(model, name, value.expand(source.shape))
    kinds = {name: model.get_parameter(name).dtype for name in names.experts}
    prefixes = {id(module): name for name, module in model.named_modules()}
    whole = adapt(model) if adapt else model
    for parent, name, block in find_blocks(whole, group):
        if id(block) not in prefixes:
            raise EpicArgumentError(
                f"adapt returned a {type(whole).__name__} with other blocks: must contain the "
                "modules of the model that it was called with"
            )
        fill = make_fill(model, group, checkpoint, names, kinds, prefixes[id(block)], block)
        new_block = Block(
            make_layer(block, group, grouped_mm, fill=fill, invariant=invariant), block
        )
        setattr(parent, name, new_block.train(block.training))
        checkpoint.close()
    refuse_saving(saving_models(whole))
    return whole


def make_fill(
    model: nn.Module,
    group: Group,
    checkpoint: Checkpoint,
    names: Names,
    kinds: dict[str, torch.dtype],
    prefix: str,
    block: nn.Module,
) -> Callable[[str, Tensor], None]:
    """Return a function (name, tensor) that reads a parameter of this rank's experts.

    Args:
        model: The model.
        group: The group.
        checkpoint: The checkpoint.
        names: The names of its tensors.
        kinds: Dtype of each parameter of experts, by its name in the model.
        prefix: Name of the block in the model.
        block: The block.

    Returns:
        The argument fill of make_layer.
    """
    family = family_of(block)

    def fill(key: str, weights: Tensor) -> None:
        target = f"{prefix}.{family.names[key]}"
        for i, out in enumerate(weights):
            expert = group.rank * len(weights) + i
            source, kind = names.experts[target], kinds[target]
            part = read_expert(checkpoint, model, target, source, expert, kind)
            out.copy_(read_tensor(family, key, [part[None]])[0])

    return fill


def set_generation_config(model: Any, folder: str | os.PathLike[str]) -> None:
    """Set the generation_config of a model from generation_config.json, if the folder has it.

    Otherwise the model keeps the settings of config.json.
    """
    from transformers import GenerationConfig

    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def pronoun_of(names: list[str]) -> str:
    """Return "them" for several names, else "it"."""
    return "them" if len(names) > 1 else "it"


def from_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    group: Group,
    *,
    grouped_mm: GroupedMm | None = None,
    invariant: bool = False,
    dtype: torch.dtype | str = "auto",
    device: Any = None,
    strict: bool = True,
    adapt: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Any:
    """Load a model of the transformers package with only the experts of this rank.

    The result has the same bits as a model that transformers loads and `replace_moe` then changes.
    But here no rank reads the experts of another rank. Every rank calls this function. The ranks do
    not wait for each other.

    Args:
        model_class: A class of transformers, such as AutoModelForCausalLM or Qwen3MoeForCausalLM.
        folder: A folder with config.json and safetensors files, as save_pretrained of transformers
            or of EPIC writes it. Every rank reads it.
        group: The open group.
        grouped_mm: As for `MoE`.
        invariant: As for `replace_moe`.
        dtype: A torch.dtype or its name: the dtype of the parameters. "auto": the dtype in
            config.json, or without one that of the files.
        device: Device of the parameters outside of the layers. None: the group's device. The layers
            are always on the group's device.
        strict: Whether it is an error if the files contain a tensor that is no parameter of the
            model. If False, such a tensor is not loaded, as in transformers.
        adapt: A function that adds adapters of peft. It is called with the model of transformers
            before the experts are read, and returns the model with adapters. Until a rank has read
            its experts, it has the adapters of all experts. None: no adapters.
        **options: Arguments of the from_pretrained of transformers, such as attn_implementation,
            key_mapping and config, or fields of the configuration, such as use_cache.

    Returns:
        The model, in evaluation mode, as from_pretrained of transformers returns it. With adapt,
        the result of adapt.

    Raises:
        EpicUnsupportedError: A block is not supported, the model has no block, or it is quantized.
        EpicArgumentError: The folder lacks a parameter of the model, or contains one that the model
            does not have or whose shape differs. The text names the parameter and the file. Or
            num_ranks does not divide the number of experts. Or this function does not support one
            of the options.

    Example:
        group = epic.torch.Group(max_tokens=4096, max_row_bytes=2 * 2048)
        model = epic.torch.from_pretrained(AutoModelForCausalLM, folder, group)
        model(ids, labels=ids).loss.backward()
        epic.torch.sum_gradients(model, group)
    """
    check_kind("group", group, Group)
    if not Path(folder).is_dir():
        raise EpicArgumentError(
            f"folder is {os.fspath(folder)!r}: must be a folder with config.json and safetensors "
            "files; download the model first, for example with huggingface_hub.snapshot_download"
        )
    dtype = options.pop("torch_dtype", dtype)  # its former name in transformers
    refused = sorted(set(REFUSED) & options.keys())
    if refused:
        raise EpicArgumentError(
            f"{refused[0]} is {options[refused[0]]!r}: must be left out; load the model with "
            "transformers and call replace_moe to use it"
        )
    skeleton = make_skeleton(model_class, Path(folder), options)
    shapes = parameters_of_experts(skeleton, group)
    checkpoint = Checkpoint(folder)
    names = Names(skeleton, checkpoint, shapes, options.get("key_mapping"))
    kind = choose_dtype(dtype, skeleton.config, checkpoint)
    model = load_others(type(skeleton), skeleton.config, checkpoint, names, kind, strict, options)
    model.to(group.device if device is None else device)
    checkpoint.close()
    model.config.name_or_path = model.name_or_path = os.fspath(folder)
    # A private attribute of transformers. With it, its save_pretrained writes the layout that was
    # read. Without it, save_pretrained would write the layout of the class.
    model._weight_conversions = names.used
    if model.can_generate():
        set_generation_config(model, folder)
    return fill_layers(model, group, checkpoint, names, grouped_mm, invariant, adapt)
