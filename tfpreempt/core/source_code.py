"""Finds in the source code of functions the values that the functions update.

A step replaces both a count of steps and the newest loss, but only the count must be
saved. The source code shows the difference: the new value of the count is computed from
the old value. The functions read source code and not bytecode, because bytecode changes
with every version of Python.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import inspect
import itertools
import random
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpreempt.core import object_graph
from tfpreempt.core.object_graph import ObjectPath

_GLOBAL_GENERATORS: tuple[Any, ...] = tuple(
    vars(module)[name].__self__
    for module, name in ((random, "random"), (np.random, "random_sample"))
)
_SEEDING = {"seed", "set_random_seed"}
_ANY_ITEM = ("item", ...)  # key of an item whose index or dict key is not a constant
_AT_BEGIN = {
    f"on_{each}begin" for each in ("train_", "epoch_", "train_batch_", "batch_")
}
_AT_END = {each.replace("begin", "end") for each in _AT_BEGIN} - {"on_train_end"}
_OF_TRAINING = {"model", "optimizer", "iterations", "logs", "numpy", "random"}


def draws_globally(function: types.FunctionType) -> bool:
    """Returns whether the source code of a function draws from the global random
    generators of Python or NumPy, and does not seed them."""
    tree = _source_tree(function)
    nodes = () if tree is None else ast.walk(tree)
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
        targets = node.targets if isinstance(node, ast.Assign) else ()
        names = _variables_in(*targets)
        return any(isinstance(variables.get(name), state) for name in names)

    def draws(called: Any) -> bool:
        is_other = object_graph.is_user_function(called)
        return is_other and called.__code__ not in running and draws_globally(called)

    running = {frame.f_code for frame in frames}
    found = dict[str, None]()
    for frame in frames:
        variables = _variables_of(frame)
        nodes = _nodes_of_running_loops(frame)
        kept = {inner for node in nodes if is_kept(node) for inner in ast.walk(node)}
        others = [node for node in nodes if node not in kept]
        found |= dict.fromkeys(map(ast.unparse, _draws(others, variables, draws)))
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
    for frame in frames:
        tree = _source_tree(frame)
        loops = list(_running_loops(frame, tree))
        if tree is None or not loops:
            continue
        variables = _variables_of(frame)
        nodes = list(dict.fromkeys(each for loop in loops for each in _own_nodes(loop)))
        steps = {"total_run_calls", "iterations"}
        for each in nodes + loops:
            match each:
                case ast.For(target=target) | ast.AugAssign(target=target):
                    names = _variables_in(target)
                    steps |= {x for x in names if isinstance(variables.get(x), int)}
                case ast.Assign() if {*map(_name, ast.walk(each.value))} & steps:
                    names = _assigned(each)  # `step = handler.total_run_calls`
                    steps |= {x for x in names if isinstance(variables.get(x), int)}
        first = set[str]()  # such as `start = handler.total_run_calls`
        used = _used_by_the_step(frame, nodes, variables)
        for line in (line for loop in loops for line in _lines(loop)):
            used -= _assigned(line)
        for node in _own_nodes(tree):
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
            for each in _own_nodes(tree)
            if isinstance(each, ast.Assign | ast.Expr) and each not in lines
        }
        return {
            text: None
            for line in lines
            if (text := ast.unparse(line)) not in elsewhere
            if _assigned(line) & used or _changes_objects(line, variables, state)
        }
    return {}


def called_callbacks(frames: Sequence[types.FrameType]) -> dict[str, Any]:
    """Returns the callbacks of Keras with a count of epochs (`wait`), such as
    EarlyStopping, whose hooks running loops call: the callback or the CallbackList, by
    name."""
    found: dict[str, Any] = {}
    for frame in frames:
        variables = _variables_of(frame)
        for node in _nodes_of_running_loops(frame):
            match node:
                case ast.Call(ast.Attribute(ast.Name(name), hook)):
                    value = variables.get(name)
                    many = [value, *(getattr(value, "callbacks", None) or ())]
                    if hook in _AT_END and any(hasattr(x, "wait") for x in many):
                        found[name] = value
    return found


def calls_of_adapt(locations: Iterable[ObjectPath]) -> dict[str, None]:
    """Returns the calls `layer.adapt(data)` in functions of the program, but not in
    hooks of a beginning, which a restart calls again.

    Args:
        locations: result of `reachable`.
    """
    functions = [
        each.value
        for each in locations
        if object_graph.is_user_function(each.value)
        if each.value.__name__ not in _AT_BEGIN
    ]
    return {
        ast.unparse(node): None
        for tree in map(_source_tree, functions)
        if tree is not None
        for node in ast.walk(tree)
        if _is_adapt(node)
    }


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
    targets = line.targets if isinstance(line, ast.Assign) else ()
    return any(
        isinstance(each, ast.Attribute) and each.attr != "trainable" for each in targets
    )


def _is_set_again(line: ast.AST, node: ast.If) -> bool:
    """Returns whether an `if` statement sets the target of a line a second time: after
    the line, or in its `else`."""
    others = {
        ast.unparse(target)
        for each in ast.walk(node)
        if isinstance(each, ast.Assign) and each is not line
        for target in each.targets
    }
    targets = line.targets if isinstance(line, ast.Assign) else ()
    return any(ast.unparse(each) in others for each in targets)


def _assigned(line: ast.AST) -> set[str]:
    """Returns the variables that an assignment sets."""
    targets = line.targets if isinstance(line, ast.Assign) else ()
    parts = (part for each in targets for part in getattr(each, "elts", [each]))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _used_by_the_step(
    frame: types.FrameType, nodes: Sequence[ast.AST], variables: Mapping[str, Any]
) -> set[str]:
    """Returns the variables from which a loop computes its running call: the variables
    in the call and in the called functions, and the variables that set these.

    Args:
        frame: the frame in which the loop runs.
        nodes: the nodes of the loop.
        variables: the variables of the frame, by name.
    """
    line = _line(frame)
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    used = _variables_in(*calls)
    for name in list(used):
        function = variables.get(name)
        function = getattr(function, "python_function", function)
        if isinstance(function, types.FunctionType):
            inside = _variables_in(*filter(None, [_source_tree(function)]))
            used |= inside.difference(function.__code__.co_varnames) & variables.keys()
    while True:
        more = {
            name
            for node in nodes
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
                is_users = object_graph.is_user_function(function)
                tree = _source_tree(function) if is_users else None
                if tree is not None and _changes_objects(tree, {}, state):
                    return True
    return False


def _line(frame: types.FrameType) -> int:
    """Returns the number of the running line in the source code of a frame."""
    return frame.f_lineno - max(1, frame.f_code.co_firstlineno) + 1


def _running_loops(
    frame: types.FrameType, tree: ast.AST | None
) -> Iterator[ast.For | ast.While]:
    """Yields the loops of a frame that are running."""
    line = _line(frame)
    for loop in [] if tree is None else _own_nodes(tree):
        if isinstance(loop, ast.For | ast.While) and (
            loop.lineno <= line <= (loop.end_lineno or 0)
        ):
            yield loop


def _nodes_of_running_loops(frame: types.FrameType) -> list[ast.AST]:
    """Returns the nodes of the loops of a frame that are running, loop by loop."""
    loops = _running_loops(frame, _source_tree(frame))
    return [node for loop in loops for node in _own_nodes(loop)]


def _variables_of(frame: types.FrameType) -> dict[str, Any]:
    """Returns the variables that the code of a frame can read, by name."""
    return {**frame.f_globals, **frame.f_locals}


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
        if any(owner is one for one in _GLOBAL_GENERATORS) or draws(each)
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

    Examples: `step = handler.total_run_calls` and `best = state.value`; and a variable
    that each pass of a loop sets from other variables. Also an iterator that skips the
    items of earlier steps: by `itertools.islice`, by an argument of a function, or by
    a loop of a single statement, such as `next(iterator)`.

    Args:
        frame: the frame.
        saved: `id()` of the saved objects.
        state: class of the objects that a commit restores.
    """

    def is_saved(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            value = variables.get(node.id)
            is_variable = id(value) in saved and hasattr(type(value), "assign")
            return is_variable or isinstance(value, state)
        return isinstance(node, ast.Attribute) and node.attr == "total_run_calls"

    def is_counted(node: ast.AST) -> bool:
        return any(map(is_saved, ast.walk(node))) or bool(_variables_in(node) & counted)

    variables = _variables_of(frame)
    iterators = {name for name, it in variables.items() if isinstance(it, Iterator)}
    tree = _source_tree(frame)
    derived, counted = set[str](), set[str]()
    loops = list(_running_loops(frame, tree))
    running = {x for loop in loops for x in (loop, *_own_nodes(loop))}
    own = [] if tree is None else _own_nodes(tree)
    for node in sorted(own, key=lambda node: getattr(node, "lineno", 0)):
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
            match line:
                case ast.Assign(targets, value):
                    pass
                case ast.AnnAssign(target, value=ast.expr() as value) | ast.NamedExpr(
                    target, value
                ):
                    targets = [target]
                case _:
                    continue
            read = _variables_in(value)
            new = _variables_in(*targets) - read
            if (body and read) or any(map(is_saved, ast.walk(value))):
                derived |= new
            counted |= new if is_counted(value) else set()
    return {("name", name) for name in derived - iterators | counted & iterators}


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


def _source_tree(function: types.FunctionType | types.FrameType) -> ast.AST | None:
    """Returns the syntax tree of a function or frame; None if the source is unknown, or
    has several lambdas in a line."""
    if isinstance(function, types.FrameType):
        return _tree_of(function.f_code)
    return _tree_of(inspect.unwrap(function).__code__)


@functools.lru_cache(maxsize=256)  # each fit reads the functions of the program
def _tree_of(code: types.CodeType) -> ast.AST | None:
    try:
        if code.co_name not in ("<lambda>", "<module>"):
            return ast.parse(textwrap.dedent(inspect.getsource(code)))
        tree = ast.parse("".join(inspect.findsource(code)[0]))
        if code.co_name == "<module>":
            return tree
        lambdas = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda)]
        [found] = [each for each in lambdas if each.lineno == code.co_firstlineno]
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    return found


def updated_keys(locations: Iterable[ObjectPath]) -> set[Any]:
    """Returns the keys of attributes and variables that functions update: the new value
    is computed from the old value.

    Examples: `n += 1`, `n = f(n)`, `n, loss = f(n, x)` and `if x < n: n = x`, but
    not `loss = f(x)`. The new value may be computed in several statements: `m, x =
    f(n)`, then `n = m`. A call of `next(iterator)` updates the iterator. A value
    also counts as updated if a hook such as `on_epoch_end` sets the value and
    another function reads it, because a restart does not call the hook. Functions
    without source code, such as functions typed at a prompt, are skipped.

    Args:
        locations: result of `reachable`; the source code of the program's functions at
            these locations is read.

    Returns:
        For an attribute its name, as in `ObjectPath.key`; ("name", name) for a
        variable; ("item", key) for an item of a container.
    """
    keys, at_end, read = set[Any](), set[Any](), set[str]()
    functions = {
        location.value: location.path.rpartition(".")[2]
        for location in reversed([*locations])
        if object_graph.is_user_function(location.value)
        or isinstance(location.value, types.FrameType)
    }
    for function, path in functions.items():
        if (tree := _source_tree(function)) is None:
            continue
        is_frame = isinstance(function, types.FrameType)
        outer = set[str](function.f_locals if is_frame else ())
        # A hook of a callback, but not `on_epoch_end` of data, which has no argument.
        is_at_end = not is_frame and function.__code__.co_argcount > 1
        is_at_end = is_at_end and bool({path, function.__name__} & _AT_END)
        local = () if is_frame else function.__code__.co_varnames
        computed = dict[str, set[str]]()  # by target: the values it is computed from
        # Inner functions that are used have locations of their own.
        own = _own_nodes(tree) if is_frame else ast.walk(tree)
        nodes = sorted(own, key=lambda node: getattr(node, "lineno", 0))
        for node in nodes:
            match node:
                case ast.Global(names) | ast.Nonlocal(names):
                    outer.update(names)
                case ast.AugAssign(target=target):
                    keys.add(_key(target, outer))
                case ast.Call(
                    ast.Name("next"), [ast.Name() | ast.Attribute() as it, *_]
                ):
                    keys.add(_key(it, _variables_in(it).difference(local)))
                case ast.Assign(targets=[target], value=value):
                    texts = _texts(value)
                    texts = texts.union(*(computed.get(each, ()) for each in texts))
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    computed.update({ast.unparse(each): texts for each in parts})
                    keys |= {
                        _key(each, outer)
                        for each in parts
                        if ast.unparse(each) in texts
                    }
                    if is_at_end:
                        at_end |= {_key(each, outer) for each in parts}
                case ast.If(test=test, body=body):
                    tested = _texts(test)
                    keys |= {
                        _key(part, outer)
                        for line in body
                        if isinstance(line, ast.Assign)
                        for target in line.targets
                        for part in getattr(target, "elts", [target])
                        if ast.unparse(part) in tested
                    }
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
    for location in locations:
        function = location.value
        if not object_graph.is_user_function(function):
            continue
        tree = _source_tree(function)
        nodes = [] if tree is None else list(ast.walk(tree))
        names = {_name(node) for node in nodes} - {None}
        called = location.path.rpartition(".")[2]
        is_hook = bool({function.__name__, called} & _AT_BEGIN)
        changing = set(map(_last, updated))
        is_free = not names & (changing | _OF_TRAINING)
        for node in nodes:
            match node:
                case ast.Call(ast.Attribute(target, "assign"), [new, *_]):
                    inside = _texts(new)
                    is_new = is_hook and is_free and ast.unparse(target) not in inside
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
