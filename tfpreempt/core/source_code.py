"""Finds in the source code of functions the values that the functions update.

A step replaces both a count of steps and the newest loss, but only the count must be
saved. The source code shows the difference: the new value of the count is computed from
the old value. The functions read source code and not bytecode, because bytecode changes
with every version of Python.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import itertools
import linecache
import random
import textwrap
import types
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import numpy as np

from tfpreempt.core import object_graph
from tfpreempt.core.object_graph import ObjectPath

GLOBAL_GENERATORS: tuple[Any, ...] = tuple(
    vars(module)[name].__self__
    for module, name in ((random, "random"), (np.random, "random_sample"))
)
"""The global random generators of Python and NumPy."""
_GENERATORS = (*map(type, GLOBAL_GENERATORS), np.random.Generator)
_SEEDING = {"seed", "set_random_seed"}
_ANY_ITEM = ("item", ...)  # key of an item whose index or dict key is not a constant
_AT_BEGIN = {
    f"on_{each}begin" for each in ("train_", "epoch_", "train_batch_", "batch_")
}
_AT_END = {each.replace("begin", "end") for each in _AT_BEGIN} - {"on_train_end"}
_PASSED_ON = {"enumerate", "zip", "islice", "map", "filter", "iter", "tqdm"}
_OF_TRAINING = {"model", "optimizer", "iterations", "logs", "numpy", "random"}


def draws_globally(function: types.FunctionType) -> bool:
    """Returns whether the source code of a function draws from the global random
    generators of Python or NumPy, and does not seed them."""
    nodes = ast.walk(_source_tree(function))
    return bool(_draws(nodes, function.__globals__, lambda called: False))


def draws_of_loops(
    frames: Sequence[types.FrameType], state: type[Any]
) -> dict[str, None]:
    """Returns the calls by which running loops draw from the global random generators
    of Python or NumPy: `np.random.permutation(n)`, or `batches(n)` if this function of
    the program draws. Their order is that of the source code.

    Leaves out loops that seed a generator, and numbers that a loop puts into a State.

    Args:
        frames: the frames of the running functions.
        state: class of the objects that a commit restores.
    """

    def is_kept(node: ast.AST) -> bool:
        names = _variables_in(*_targets(node))
        return any(isinstance(code.variables.get(name), state) for name in names)

    def draws(called: Any) -> bool:
        is_other = object_graph.is_user_function(called)
        return is_other and called.__code__ not in running and draws_globally(called)

    running = {frame.f_code for frame in frames}
    found = dict[str, None]()
    for code in map(_RunningCode, frames):
        kept = {node for each in code.nodes if is_kept(each) for node in ast.walk(each)}
        others = [node for node in code.nodes if node not in kept]
        found |= dict.fromkeys(map(ast.unparse, _draws(others, code.variables, draws)))
    return found


def set_at_steps(
    frames: Sequence[types.FrameType], state: type[Any]
) -> dict[str, None]:
    """Returns the statements by which running loops change, at certain steps only,
    state that later steps use: `noise = 1.0` or `layer.trainable = True` in
    `if step == 10:`. A run that restarts after step 10 does not execute the statement.

    Counted are variables from which the loop computes the arguments of its step,
    attributes of the program's objects, `trainable` of a layer, and `layer.adapt()`.
    Leaves out variables that each pass sets, or that are set from a State or from the
    number of completed steps, and attributes that are set in each n-th step, such as
    the newest validation loss.

    Args:
        frames: the frames of the running functions.
        state: class of the objects that a commit restores.
    """

    def is_restored(value: ast.AST, variables: Mapping[str, Any]) -> bool:
        states = {name for name, it in variables.items() if isinstance(it, state)}
        names = {_name(each) for each in ast.walk(value)}
        return bool(names & {"total_run_calls", *states})

    # A restart runs the loops of the callers from the beginning.
    for code in map(_RunningCode, frames):
        if not code.loops:
            continue
        variables, nodes = code.variables, code.nodes
        steps = {"total_run_calls", "iterations"}
        for each in nodes:
            match each:
                case ast.For(target=target) | ast.AugAssign(target=target):
                    names = _variables_in(target)
                    steps |= {x for x in names if isinstance(variables.get(x), int)}
                case ast.Assign() if {*map(_name, ast.walk(each.value))} & steps:
                    names = _assigned(each)  # `step = handler.total_run_calls`
                    steps |= {x for x in names if isinstance(variables.get(x), int)}
        first = set[str]()  # such as `start = handler.total_run_calls`
        used = _used_by_the_step(code)
        for line in (line for loop in code.loops for line in _lines(loop)):
            used -= _assigned(line)
        for node in code.own:
            if isinstance(node, ast.Assign) and is_restored(node.value, variables):
                used -= _assigned(node)
                first |= _assigned(node) - steps
        lines = {
            line: None  # in the order of the source code
            for node in nodes
            if isinstance(node, ast.If) and _is_at_a_step(node, steps)
            if not _variables_in(node.test) & first
            for line in _own_nodes(ast.Module(node.body, []))
            if isinstance(line, ast.Assign | ast.Expr)
            if not _is_set_again(line, node)
            if not (_is_periodic(node) and _sets_attribute(line))
        }
        elsewhere = {
            ast.unparse(each)
            for each in code.own
            if isinstance(each, ast.Assign | ast.Expr) and each not in lines
        }
        return {
            text: None
            for line in lines
            if (text := ast.unparse(line)) not in elsewhere
            if _assigned(line) & used or _changes_objects(line, variables, state)
        }
    return {}


def fetched_by_loops(
    frames: Sequence[types.FrameType], saved: Collection[Any]
) -> dict[str, None]:
    """Returns the saved iterators from which running loops fetch the arguments of their
    step: `for batch in iterator`, or `batch = next(iterator)` or
    `iterator.get_next()` outside of the step. A commit then has the position after a
    batch that no step has trained. Leaves out inner loops that do not run, such as an
    evaluation.

    Args:
        frames: the frames of the running functions.
        saved: `id()` of the saved objects.
    """

    def is_saved(node: ast.AST, variables: Mapping[str, Any]) -> bool:
        value: Any = None
        match node:
            case ast.Name(name):
                value = variables.get(name)
            case ast.Attribute(ast.Name(name), attribute):
                value = getattr(variables.get(name), "__dict__", {}).get(attribute)
        return isinstance(value, Iterator) and id(value) in saved

    found = dict[str, None]()
    for code in map(_RunningCode, frames):
        used = _variables_in(*code.calls)
        loops = {x for x in code.nodes if isinstance(x, ast.For | ast.While)}
        inner = {x for each in loops.difference(code.loops) for x in ast.walk(each)}
        for node in code.nodes:
            if node in inner:
                continue
            sources: Iterable[ast.AST] = ()
            match node:
                case ast.For(target, data) if _variables_in(target) & used:
                    sources = _iterated(data)
                case ast.Call() if node in code.calls:
                    sources = _fetched_by(node)
                case ast.Assign(value=value) if _assigned(node) & used:
                    sources = _fetched_by(value)
            names = [each for each in sources if is_saved(each, code.variables)]
            found |= dict.fromkeys(map(ast.unparse, names))
    return found


def _iterated(data: ast.expr) -> list[ast.expr]:
    """Returns the expressions whose items a `for` loop gets: `x` and `y` of
    `for ... in zip(x, y)`."""
    match data:
        case ast.Call(function, arguments) if _name(function) in _PASSED_ON:
            return [part for each in arguments for part in _iterated(each)]
    return [data]


def _fetched_by(node: ast.AST) -> list[ast.expr]:
    """Returns the iterators from which an expression fetches items, by `next(x)` or
    `x.get_next()`, without the bodies of inner functions."""
    found = []
    for each in _own_nodes(node):
        match each:
            case ast.Call(ast.Name("next"), [iterator, *_]):
                found.append(iterator)
            case ast.Call(ast.Attribute(iterator, "get_next")):
                found.append(iterator)
    return found


def _passed_by(frame: types.FrameType) -> set[str]:
    """Returns the names of the iterators that running loops pass to functions of the
    program, such as an evaluation, without the running calls, which lead to the step.
    Leaves out iterators that a loop creates again and again."""
    code = _RunningCode(frame)
    created = set[str]().union(*map(_assigned, code.nodes))
    calls = (node for node in code.nodes if isinstance(node, ast.Call))
    return {
        name
        for node in calls
        if node not in code.calls and _is_of_program(node.func, code.variables)
        for name in _variables_in(*node.args) - created
        if isinstance(code.variables.get(name), Iterator)
    }


def _is_of_program(node: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Returns whether an expression names a function or method of the program, or such
    a function in a tf.function."""
    match node:
        case ast.Name(name):
            called = variables.get(name)
        case ast.Attribute(ast.Name(name), method):
            called = getattr(type(variables.get(name)), method, None)
        case _:
            return False
    return _is_defined_by_user(getattr(called, "python_function", called))


def called_callbacks(frames: Sequence[types.FrameType]) -> dict[str, Any]:
    """Returns the callbacks of Keras with a count of epochs (`wait`), such as
    EarlyStopping, whose hooks running loops call: the callback or the CallbackList, by
    name."""
    found: dict[str, Any] = {}
    for code in map(_RunningCode, frames):
        for node in code.nodes:
            match node:
                case ast.Call(ast.Attribute(ast.Name(name), hook)) if hook in _AT_END:
                    value = code.variables.get(name)
                    many = [
                        value,
                        *object_graph.leaves(getattr(value, "callbacks", None)),
                    ]
                    if any(hasattr(each, "wait") for each in many):
                        found[name] = value
    return found


def calls_of_adapt(
    locations: Iterable[ObjectPath], called: Collection[str]
) -> dict[str, None]:
    """Returns the calls `layer.adapt(data)` in functions of the program, but not in
    hooks of a beginning, which a restart calls again, and in functions that only these
    hooks call.

    Args:
        locations: result of `reachable`.
        called: names of methods that a library calls.
    """
    names = _functions_at(locations)
    nodes = {each: [*ast.walk(_source_tree(each))] for each in names}
    again = {each for each in nodes if _is_at_begin(each, names[each])}
    count = -1
    while count < len(again):  # until no further function is found
        count = len(again)
        inside = {_name(node) for each in again for node in nodes[each]}
        others = {_name(node) for each in nodes.keys() - again for node in nodes[each]}
        only_again = _AT_BEGIN | inside.difference(others, called)
        again |= {each for each in nodes if names[each] <= only_again}
    return {
        ast.unparse(node): None
        for each in nodes
        if each not in again
        for node in nodes[each]
        if _is_adapt(node)
    }


def _functions_at(locations: Iterable[ObjectPath]) -> dict[Any, set[str]]:
    """Returns the functions of the program at some locations, with their last names
    there, such as the name of a hook."""
    found = collections.defaultdict[Any, set[str]](set)
    for location in locations:
        if object_graph.is_user_function(location.value):
            found[location.value].add(location.path.rpartition(".")[2])
    return found


def _is_at_begin(function: types.FunctionType, names: set[str]) -> bool:
    """Returns whether a function, which has some names in its locations, is only a hook
    of a beginning."""
    return function.__name__ in _AT_BEGIN or names <= _AT_BEGIN


def _is_adapt(node: ast.AST) -> bool:
    """Returns whether a statement is `layer.adapt(data)`. The method of a layer returns
    None, so `fast = learner.adapt(data)` calls another method."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(attr="adapt"))):
            return True
        case _:
            return False


def _is_at_a_step(node: ast.If, steps: set[str]) -> bool:
    """Returns whether a condition holds at certain steps, but not at all later steps:
    `step == 10` and `step % 10 == 0`, not `step >= 10`."""
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.ops[0], ast.Eq | ast.In)
        and {_name(part) for part in ast.walk(each)} & steps
        for each in ast.walk(node.test)
    )


def _is_periodic(node: ast.If) -> bool:
    """Returns whether a condition contains a remainder, such as `step % 100`."""
    return any(isinstance(each, ast.Mod) for each in ast.walk(node.test))


def _sets_attribute(line: ast.AST) -> bool:
    """Returns whether a statement sets an attribute other than `trainable`."""
    return any(
        isinstance(each, ast.Attribute) and each.attr != "trainable"
        for each in _targets(line)
    )


def _is_set_again(line: ast.AST, node: ast.If) -> bool:
    """Returns whether an `if` statement sets the target of a line a second time: after
    the line, or in its `else`."""
    others = {
        ast.unparse(target)
        for each in ast.walk(node)
        if each is not line
        for target in _targets(each)
    }
    return any(ast.unparse(each) in others for each in _targets(line))


def _assigned(line: ast.AST) -> set[str]:
    """Returns the variables that an assignment sets."""
    return {part.id for part in _targets(line) if isinstance(part, ast.Name)}


def _targets(line: ast.AST) -> list[ast.expr]:
    """Returns the targets of an assignment, the parts of a tuple one by one; nothing
    for another statement."""
    match line:
        case ast.Assign(targets):
            pass
        case ast.AnnAssign(target, value=ast.expr()) | ast.NamedExpr(target):
            targets = [target]
        case _:
            return []
    parts = (part for each in targets for part in getattr(each, "elts", [each]))
    return [each.value if isinstance(each, ast.Starred) else each for each in parts]


def _used_by_the_step(code: _RunningCode) -> set[str]:
    """Returns the variables from which a loop computes its running call: the variables
    in the call and in the called functions, and the variables that set these."""
    variables = code.variables
    used = _variables_in(*code.calls)
    for name in list(used):
        function = variables.get(name)
        function = getattr(function, "python_function", function)
        if isinstance(function, types.FunctionType):
            inside = _variables_in(_source_tree(function))
            used |= inside.difference(function.__code__.co_varnames) & variables.keys()
    while True:
        more = {
            name
            for node in code.nodes
            if isinstance(node, ast.Assign) and _assigned(node) & used
            for name in _variables_in(node.value)
        }
        if more <= used:
            return used
        used |= more


def _changes_objects(
    line: ast.AST, variables: Mapping[str, Any], state: type[Any]
) -> bool:
    """Returns whether a statement sets `trainable` or a plain attribute of an object of
    the program, or calls `adapt`, itself or in a function of the program."""
    for node in ast.walk(line):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="trainable")]):
                return True
            case ast.Expr() if _is_adapt(node):
                return True
            case ast.Assign(targets=[ast.Attribute(ast.Name(name), attribute)]):
                owner = variables.get(name)
                kind: type = type(owner)
                value = getattr(owner, "__dict__", {}).get(attribute)
                if isinstance(value, bool | int | float | str) and (
                    object_graph.is_user_code(kind) and not isinstance(owner, state)
                ):
                    return True
            case ast.Call(called):
                function = _called(called, variables)
                if object_graph.is_user_function(function) and (
                    _changes_objects(_source_tree(function), {}, state)
                ):
                    return True
    return False


class _RunningCode:
    """The source code of a running function or module.

    Args:
        frame: the frame of the function.

    Attributes:
        variables: the variables that the code can read, by name.
        tree: the syntax tree of the code.
        own: the nodes of the code without inner functions.
        line: the running line, as a line of the nodes.
        loops: the running loops, from the outermost to the innermost.
        nodes: the loops and their nodes, loop by loop.
        calls: the running calls in the loops.
    """

    def __init__(self, frame: types.FrameType) -> None:
        self.variables = {**frame.f_globals, **frame.f_locals}
        self.line = frame.f_lineno - max(1, frame.f_code.co_firstlineno) + 1
        self.tree = _source_tree(frame)
        self.own = [*_own_nodes(self.tree)]
        self.loops = [
            node
            for node in self.own
            if isinstance(node, ast.For | ast.While) and self.is_running(node)
        ]
        every = (node for loop in self.loops for node in _own_nodes(loop))
        self.nodes = list(dict.fromkeys(every))
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        self.calls = list(filter(self.is_running, calls))

    def is_running(self, node: ast.stmt | ast.expr) -> bool:
        """Returns whether the running line is a line of a statement or expression."""
        return node.lineno <= self.line <= (node.end_lineno or 0)


def _draws(
    nodes: Iterable[ast.AST],
    variables: Mapping[str, Any],
    draws: Callable[[Any], bool],
) -> list[ast.Call]:
    """Returns the calls that draw from the global random generators of Python or NumPy;
    nothing if a call seeds a generator.

    Args:
        nodes: nodes of a syntax tree.
        variables: variables that the calls can read, by name.
        draws: function that returns whether a called object draws, for other objects
            than the methods of the generators.
    """
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = [_called(node.func, variables) for node in calls]
    if any(getattr(each, "__name__", "") in _SEEDING for each in called):
        return []
    owners = [getattr(each, "__self__", None) for each in called]
    return [
        node
        for node, each, owner in zip(calls, called, owners, strict=True)
        if any(owner is one for one in GLOBAL_GENERATORS) or draws(each)
    ]


def _called(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Returns the object to which an expression such as `np.random.normal` refers in a
    module; None for an expression of another form."""
    match node:
        case ast.Name(name):
            return variables.get(name)
        case ast.Attribute(value=value, attr=name):
            module = _called(value, variables)
            if isinstance(module, types.ModuleType):
                with contextlib.suppress(ImportError):  # of a lazy module
                    return getattr(module, name, None)
    return None


def derived_keys(frame: types.FrameType, saved: set[Any], state: type[Any]) -> set[Any]:
    """Returns the keys of variables that a frame sets from other values, so that a
    restart does so too.

    Examples: `step = handler.total_run_calls`, then `epoch = step // 100`, and
    `best = state.value`, unless the State is read before the frame has created the
    handler, which restores the State; and a variable that each pass of a loop sets from
    other variables. The key of an attribute such as `self.step` is ("name",
    "self.step"). A random generator counts only if each pass sets it. Also variables of
    an evaluation between two steps, see `_unused_in_steps`; and an iterator
    that skips the items of earlier steps: by `itertools.islice`, by an argument of a
    function, or by a loop of a single statement, such as `next(iterator)`.

    Args:
        frame: the frame.
        saved: `id()` of the saved objects.
        state: class of the objects that a commit restores.
    """

    def is_saved(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            value = code.variables.get(node.id)
            is_variable = id(value) in saved and hasattr(type(value), "assign")
            return is_variable or isinstance(value, state)
        return isinstance(node, ast.Attribute) and node.attr == "total_run_calls"

    def is_counted(node: ast.AST) -> bool:
        return any(map(is_saved, ast.walk(node))) or bool(_variables_in(node) & counted)

    code = _RunningCode(frame)
    names = code.variables.items()
    iterators = {name for name, it in names if isinstance(it, Iterator)}
    generators = {name for name, it in names if isinstance(it, _GENERATORS)}
    derived, counted, from_saved = set[str](), set[str](), set[str]()
    running = {*code.nodes}
    loops = (each for each in code.own if isinstance(each, ast.For | ast.While))
    first = {*code.own}.difference(*map(_own_nodes, loops))  # not in a loop
    restored_at = _line_of_handler(code)
    for node in sorted(code.own, key=lambda node: getattr(node, "lineno", 0)):
        match node:
            case ast.For(target=target):
                derived |= _variables_in(target)
            case ast.withitem(optional_vars=ast.expr() as target):
                derived |= _variables_in(target)
        match node:
            case _ if node in running:
                pass
            case ast.For(iter=times, body=[ast.Expr() | ast.Assign() as skip]):
                counted |= _variables_in(skip) if is_counted(times) else set()
            case ast.Expr(value) if is_counted(value):  # `skip(iterator, step)`
                counted |= _variables_in(value)
        body = _lines(node) if isinstance(node, ast.For | ast.While) else []
        for line in [node, *body]:
            targets, new_value = _targets(line), getattr(line, "value", None)
            if not targets or new_value is None:
                continue
            read = _variables_in(new_value)
            new = (_assigned(line) | _filled(targets)) - read
            is_restored = getattr(line, "lineno", 0) >= restored_at
            # A restart executes a statement of a running loop only if its condition
            # holds again.
            is_again = is_restored and node not in running
            texts = _texts(new_value)
            is_from_saved = any(map(is_saved, ast.walk(new_value)))
            if is_again and (is_from_saved or (texts & from_saved and node in first)):
                attributes = {ast.unparse(x) for x in targets if _is_attribute(x)}
                from_saved |= (new - generators) | (attributes - texts)
            derived |= new if body and read else set()
            counted |= new if is_counted(new_value) else set()
    derived |= from_saved | _unused_in_steps(code)
    return {("name", name) for name in derived - iterators | counted & iterators}


def _filled(targets: Iterable[ast.expr]) -> set[str]:
    """Returns the variables whose items an assignment sets all: `batch[:] = x`."""
    found = set[str]()
    for each in targets:
        match each:
            case ast.Subscript(ast.Name(name), ast.Slice(None, None, None)):
                found.add(name)
            case ast.Subscript(ast.Name(name), ast.Constant(value=builtins.Ellipsis)):
                found.add(name)
    return found


def _is_attribute(node: ast.expr) -> bool:
    """Returns whether an expression is an attribute of a variable."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _unused_in_steps(code: _RunningCode) -> set[str]:
    """Returns the variables that running loops set and use only between two steps: in a
    block of statements whose lines from the assignment to the last use do not contain
    the running call. An example is the sum of the losses in an evaluation: `total = 0`
    in `if step % 100 == 0:`.
    """
    uses = collections.defaultdict[str, list[int]](list)
    elsewhere = set[str]()  # other functions may use these variables
    for node in ast.walk(code.tree):
        match node:
            case ast.Global(names) | ast.Nonlocal(names):
                elsewhere.update(names)
            case ast.AugAssign(target=ast.Name(name)) | ast.Name(
                name, ast.Load() | ast.Del()
            ):
                uses[name].append(node.lineno)
    found = set[str]()
    blocks = (
        block
        for node in code.nodes
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list)
    )
    for block in blocks:
        ends = [line.end_lineno or 0 for line in block]
        for line in block:
            if not isinstance(line, ast.Assign):
                continue
            for name in _assigned(line) - _variables_in(line.value) - elsewhere:
                used = uses[name]
                if used and line.lineno < min(used) and max(used) <= ends[-1]:
                    last = next(end for end in ends if end >= max(used))
                    if not line.lineno <= code.line <= last:
                        found.add(name)
    return found


def _line_of_handler(code: _RunningCode) -> int:
    """Returns the line at which a running function has created its newest handler; 0 if
    the function creates no handler, or loads the States itself.

    A statement that gives a handler another name creates no handler.
    """

    def is_handler(name: str) -> bool:
        return hasattr(type(code.variables.get(name)), "total_run_calls")

    line = 0
    for node in code.own:
        match node:
            case ast.withitem(ast.Call() as call, ast.Name(name)):
                names = {name}
            case ast.Assign(value=ast.Call() as call):
                names = _assigned(node)
            case ast.AnnAssign(value=ast.Call() as call):
                names = _assigned(node)
            case ast.Call() if _name(node.func) == "load_state":
                return 0
            case _:
                continue
        is_new = not any(map(is_handler, _variables_in(call)))
        if is_new and any(map(is_handler, names)) and call.lineno <= code.line:
            line = max(line, call.lineno)
    return line


def _lines(loop: ast.For | ast.While) -> Iterator[ast.AST]:
    """Yields the statements that each pass of a loop executes, and the assignments in
    the loop's condition."""
    if isinstance(loop, ast.While):
        yield from ast.walk(loop.test)
    todo: list[ast.AST] = [*loop.body]
    for line in todo:  # grows
        yield line
        if isinstance(line, ast.With | ast.Try):
            todo += line.body


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function or module without the bodies of inner functions
    and classes, which have variables of their own."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    todo = [tree]
    match tree:
        case ast.Module([ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body)]):
            todo = [*body]  # of the running function
    for node in todo:  # grows
        yield node
        if not isinstance(node, inner):
            todo += ast.iter_child_nodes(node)


def _texts(node: ast.AST) -> set[str]:
    """Returns the source code of the variables, attributes and items in an expression.
    The source code of other nodes cannot equal a target of an assignment."""
    return {
        ast.unparse(each)
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
    }


def _variables_in(*nodes: ast.AST) -> set[str]:
    every = itertools.chain.from_iterable(map(ast.walk, nodes))
    return {each.id for each in every if isinstance(each, ast.Name)}


def _is_defined_by_user(function: Any) -> bool:
    """Returns whether the code of a function is in a module of the program. The
    attribute `__module__` of a decorated function names the decorated function's
    module."""
    variables = getattr(function, "__globals__", {})
    return object_graph.is_user_module(variables.get("__name__", ""))


def _source_tree(
    function: types.FunctionType | types.FrameType,
    stop: Callable[[Any], bool] | None = None,
) -> ast.AST:
    """Returns the syntax tree of a function or frame; an empty module if the source is
    unknown, or has several lambdas in a line.

    Args:
        function: a function; of a function with decorators, the decorated function.
        stop: function that returns whether to take a decorator's function instead.
    """
    if isinstance(function, types.FrameType):
        code, variables = function.f_code, function.f_globals
    else:
        inner = inspect.unwrap(function, stop=stop)
        code, variables = inner.__code__, inner.__globals__
    linecache.lazycache(code.co_filename, variables)  # a module in a zip file
    return _tree_of(code)


@functools.lru_cache(maxsize=256)  # each fit reads the functions of the program
def _tree_of(code: types.CodeType) -> ast.AST:
    # `inspect.getsource` takes half a second: it searches the module of the code in
    # all imported modules, and so also loads TensorFlow's lazy modules.
    lines = linecache.getlines(code.co_filename)
    unknown = ast.Module([], [])
    if code.co_firstlineno > len(lines):  # unknown, or shorter than at the import
        return unknown
    try:
        if code.co_name not in ("<lambda>", "<module>"):
            block = inspect.getblock(lines[code.co_firstlineno - 1 :])
            return ast.parse(textwrap.dedent("".join(block)))
        tree = ast.parse("".join(lines))
        if code.co_name == "<module>":
            return tree
        lambdas = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda)]
        [found] = [each for each in lambdas if each.lineno == code.co_firstlineno]
    except (SyntaxError, ValueError):
        return unknown
    return found


def updated_keys(locations: Sequence[ObjectPath]) -> set[Any]:
    """Returns the keys of attributes and variables that functions update: the new value
    is computed from the old value.

    Examples: `n += 1`, `n = f(n)`, `n, loss = f(n, x)`, and both variables in
    `if x < n: n = x; best = y`, but not `loss = f(x)`. The new value may be computed in
    several statements: `m, x = f(n)`, then `n = m`. A call of `next(iterator)` or
    `iterator.get_next()` updates the iterator, and so does a call outside of the step
    with the iterator, in a running loop. A value also counts as updated if a hook
    such as `on_epoch_end` sets the value and another function reads the value, because
    a restart does not call the hook. Functions without source code, such as functions
    typed at a prompt, are skipped.

    Args:
        locations: result of `reachable`; the source code of the program's functions at
            these locations is read.

    Returns:
        For an attribute its name, as in `ObjectPath.key`; ("name", name) for a
        variable; ("item", key) for an item of a container.
    """
    keys, at_end, read = set[Any](), set[Any](), set[str]()
    functions = _functions_at(locations)
    functions |= {
        each.value: set[str]()
        for each in locations
        if isinstance(each.value, types.FrameType)
    }
    for function, names in functions.items():
        # A function that a decorator wraps has a location of its own.
        tree = _source_tree(function, _is_defined_by_user)
        is_frame = isinstance(function, types.FrameType)
        outer = set[str](function.f_locals if is_frame else ())
        # A hook of a callback, but not `on_epoch_end` of data, which has no argument.
        is_at_end = not is_frame and function.__code__.co_argcount > 1
        is_at_end = is_at_end and bool({*names, function.__name__} & _AT_END)
        local = () if is_frame else function.__code__.co_varnames
        keys |= {("name", each) for each in _passed_by(function)} if is_frame else set()
        computed = dict[str, set[str]]()  # by target: the values it is computed from
        replaced = set[str]()  # targets that were set from other values
        # Inner functions that are used have locations of their own.
        own = _own_nodes(tree) if is_frame else ast.walk(tree)
        nodes = sorted(own, key=lambda node: getattr(node, "lineno", 0))
        for node in nodes:
            match node:
                case ast.Global(outer_names) | ast.Nonlocal(outer_names):
                    outer.update(outer_names)
                case ast.AugAssign(target=target, value=value):
                    keys.add(_key(target, outer))
                    known = computed.get(ast.unparse(target), set())
                    texts = _texts(value) - replaced
                    computed[ast.unparse(target)] = known | texts
                case ast.Call():
                    keys |= {
                        _key(each, _variables_in(each).difference(local))
                        for each in _fetched_by(node)
                        if isinstance(each, ast.Name | ast.Attribute)
                    }
                case ast.Assign(value=value) | ast.NamedExpr(value=value):
                    texts, parts = _texts(value), _targets(node)
                    texts = texts.union(*(computed.get(each, ()) for each in texts))
                    computed.update({ast.unparse(each): texts for each in parts})
                    replaced |= {*map(ast.unparse, parts)} - texts
                    keys |= {
                        _key(each, outer)
                        for each in parts
                        if ast.unparse(each) in texts
                    }
                    if is_at_end:
                        at_end |= {_key(each, outer) for each in parts}
                case ast.If(test=test, body=body):
                    tested = _texts(test)
                    parts = [part for line in body for part in _targets(line)]
                    # What is set with a new best value belongs to the value.
                    if any(ast.unparse(part) in tested for part in parts):
                        keys |= {_key(part, outer) for part in parts}
                case ast.Name(name, ast.Load()) | ast.Attribute(_, name, ast.Load()):
                    read |= set() if is_at_end else {name}
    return keys | {key for key in at_end if _last(key) in read}


def set_at_begin(
    locations: Sequence[ObjectPath], updated: set[Any]
) -> list[ObjectPath]:
    """Returns the locations of variables that only hooks at a beginning assign, such as
    `beta.assign(epoch / 10)` in `on_epoch_begin`: a restart calls these hooks again.

    A variable is left out if its new value may depend on training: if the source code
    of the hook contains the model, or a name that training updates.

    Args:
        locations: result of `reachable`.
        updated: result of `updated_keys`.
    """
    again, others = set[Any](), set[Any]()
    changing = set(map(_last, updated)) | _OF_TRAINING
    for function, names in _functions_at(locations).items():
        nodes = list(ast.walk(_source_tree(function)))
        is_free = not set(map(_name, nodes)) & (changing - {None})
        is_hook = is_free and _is_at_begin(function, names)
        for node in nodes:
            match node:
                case ast.Call(ast.Attribute(target, "assign"), [new, *_]):
                    inside = _texts(new)
                    is_new = is_hook and ast.unparse(target) not in inside
                    (again if is_new else others).add(_name(target))
                case ast.Call(ast.Attribute(target, str(method))):
                    if method.startswith("assign"):
                        others.add(_name(target))
    named = collections.defaultdict[int, set[Any]](set)
    for location in locations:
        named[id(location.value)].add(location.key)
    return [
        each
        for each in locations
        if named[id(each.value)] & again and not named[id(each.value)] & others
    ]


def reset_before_use(locations: Sequence[ObjectPath]) -> list[ObjectPath]:
    """Returns the locations of metrics that are used only in functions that begin with
    `metric.reset_state()`, such as an evaluation: no step needs their earlier values.

    Functions that run steps, and generators, do not count: a step may be between the
    reset and the use.

    Args:
        locations: result of `reachable`.
    """
    again, others, steps, running = set[Any](), set[Any](), set[Any](), set[Any]()
    named = collections.defaultdict[int, set[Any]](set)
    for location in locations:
        named[id(location.value)].add(location.key)
        if isinstance(location.value, types.FrameType):
            code = _RunningCode(location.value)
            running.add(location.value.f_code)
            others |= set(map(_name, code.nodes))
            calls = [node for node in code.own if isinstance(node, ast.Call)]
            steps |= {_name(each.func) for each in calls if code.is_running(each)}
    for function in _functions_at(locations):
        body: list[ast.stmt] = []
        match _source_tree(function):
            case ast.Module([ast.FunctionDef(body=body)]):
                pass
            case ast.Lambda(body=value):
                body = [ast.Expr(value)]
        if function.__code__ in running:
            continue  # its loops are in `others`
        names = {_name(node) for line in body for node in ast.walk(line)}
        is_at_once = not (names & steps or inspect.isgeneratorfunction(function))
        reset = set[Any]()
        for line in body:
            match line:
                case ast.Expr(
                    ast.Call(ast.Attribute(metric, "reset_state" | "reset_states"))
                ) if is_at_once:
                    reset.add(_name(metric))
            others |= {_name(node) for node in ast.walk(line)} - reset
        again |= reset
    return [
        each
        for each in locations
        if named[id(each.value)] <= again - others
        if hasattr(type(each.value), "update_state")
    ]


def _last(key: Any) -> Any:
    """Returns the name in a key of `updated_keys`."""
    return key[1] if isinstance(key, tuple) else key


def _name(node: ast.AST) -> str | None:
    """Returns the last name of a variable or attribute; None for other nodes."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return None


def is_updated(location: ObjectPath, keys: set[Any]) -> bool:
    """Returns whether a function updates the value at a location, according to the
    result `keys` of `updated_keys`."""
    owner = location.owner
    if isinstance(owner, dict | list) and location.path.endswith("]"):
        return bool(keys & {("item", location.key), _ANY_ITEM})
    is_global = isinstance(owner, dict) and "." not in location.path
    is_variable = is_global or isinstance(owner, types.CellType | types.CodeType)
    return (("name", location.key) if is_variable else location.key) in keys


def _key(target: ast.expr, outer: set[str]) -> Any:
    match target:
        case ast.Name(name):
            # A local variable is not kept between calls.
            return ("name", name) if name in outer else ""
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(key)):
            return "item", key
    return _ANY_ITEM
