"""The operators of a traced graph: they name its group by a name that is the export's own, and are called whole.

A graph keeps the names of the groups of the program that traced it. In another program a group of such a name may be
one of other ranks, without an error. So an export has a name of its own, registered for the group that it is loaded
for.
"""

from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tp_ext import _ops
from tp_ext.group import ParallelGroup


def rename_group(program: ExportedProgram, group: ParallelGroup, name: str) -> None:
    """Replaces the name of the group in all operators of a graph.

    Raises:
        ValueError: an operator names another group, or the group with options.
    """
    names = {group.name: f"{name}@{group.rank}/{group.size}", group.torch_name: name} if group.name else {}
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                _rename(node, names)
            module.recompile()


def call_whole(program: ExportedProgram) -> None:
    """Replaces operators by those that a compiler does not take apart."""
    for node in program.graph.nodes:
        node.target = _ops.whole_operators.get(node.target, node.target)
    program.graph_module.recompile()


def _rename(node: Node, names: dict[str, str]) -> None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.partition("::")[0] not in ("tp_ext", "_c10d_functional", "c10d"):
        return
    places = {argument.name: index for index, argument in enumerate(schema.arguments)}
    for key in ("group", "group_name"):
        index = places.get(key, -1)
        if key in node.kwargs:
            node.kwargs = {**node.kwargs, key: _renamed(node, node.kwargs[key], names)}
        elif 0 <= index < len(node.args):
            node.args = (*node.args[:index], _renamed(node, node.args[index], names), *node.args[index + 1 :])


def _renamed(node: Node, group: Any, names: dict[str, str]) -> Any:
    if group == "" or (isinstance(group, str) and group.endswith("@0/1")):
        return ""  # one rank
    if not isinstance(group, str) or group not in names:
        raise ValueError(
            f"model: {module_of(node)}, operator {node.target}: communicates over {group!r}, and an exported "
            f"model has one group, {next(iter(names), 'none')!r}"
        )
    return names[group]


def module_of(node: Node) -> str:
    """Returns the path and the type of the module in whose forward a node was traced."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the model")
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"module {path.removeprefix('model.')!r} ({kind.rpartition('.')[2]})"
