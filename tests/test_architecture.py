"""The shape of the package, read from its source: docs/architecture.md, executable.

A rule that has exceptions lists them by file with the reason. Nothing here imports
TensorFlow.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import graphlib
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.without_tensorflow import WITHOUT_TENSORFLOW
from tfpreempt.core import frameworks, private_api

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfpreempt"

# The floor of each package: a package imports from itself and from lower floors.
FLOORS = {
    "__main__": 7, "trackers": 7,
    "cli": 6,
    "keras": 5, "testing": 5,
    "states": 4,
    "handler": 4,
    "platforms": 3, "data": 3, "jax": 3,
    "notice": 2, "coordination": 2, "checkpoint": 2,
    "storage": 1,
    "core": 0, "errors": 0,
}  # fmt: skip
# Same floor, one direction.
SAME_FLOOR = {
    ("states", "handler"),  # their States are saved with the handler's commits
    ("core", "errors"),
}

# The modules that import TensorFlow, Keras or JAX, or use private names of these, with
# the reason; and four packages. All other modules are the core, which works without
# these frameworks. The list may only shrink. Only modules of this list import a module
# of the list; the core imports some as adapters of `core/frameworks.py`.
TENSORFLOW = {
    "cli/demo/jax_worker.py": "the demo's training program, a process of its own",
    "cli/demo/tensorflow_worker.py": "the same on TensorFlow",
    "cli/demo/training.py": "parts of both of the demo's training programs",
    "handler/tensorflow_adapter.py": "errors, and the coordination service",
    "states/tensorflow_states.py": "States of TensorFlow's own things",
}
TENSORFLOW_FOLDERS = {
    "checkpoint/tensors": "variables, iterators and checkpoint files of TensorFlow",
    "data": "pipelines of tf.data",
    "keras": "callbacks for Keras",
    "jax": "processes and arrays of JAX; without TensorFlow",
}
# Modules that use TensorFlow's eager context, with the reason.
EAGER_CONTEXT = {
    "handler/tensorflow_adapter.py": "the coordination service has no public interface",
    "checkpoint/tensors/bundle_reader.py": "this machine, as devices are named",
    "checkpoint/tensors/gather.py": "this machine, as devices are named",
    "checkpoint/tensors/variables.py": "this machine, as devices are named",
    "checkpoint/tensors/program_values.py": "the global seed is private",
}
# Private names outside of `private_api.py` that are not TensorFlow's or Keras'.
OTHER_PRIVATE = {
    "_DummyThread": "threading",
    "_current_exceptions": "sys",
    "_current_frames": "sys",
    "_exit": "os",
    "_getframe": "sys",
    "_is_default": "a mark on a function of ours, which Keras looks for",
    "_strip_protocol": "fsspec",
}
# Tables of names that a version may lack: the module skips missing names.
LENIENT = {
    "keras/callbacks/builtin_callbacks.py": "what callbacks of Keras remember, by class"
}
# Modules that sleep. All others wait for an event, with a deadline.
SLEEPERS = {
    "cli/run/orphan_reaper.py": "a process of its own that waits for orphaned children",
    "notice/forked_children.py": "runs in a forked child, whose clock nobody moves",
    "storage/gcs_client.py": "the pause before a retry; a deadline is the caller's",
}
# Modules that change files without `core/contained.py` and `storage/files.py`, with the
# reason. No other module may follow a link that another user put into a directory.
CHANGE_FILES = {
    "checkpoint/directory/cache.py": "a directory of this user, closed to others",
    "checkpoint/restore/handle.py": "removes the empty directory that the user named",
    "checkpoint/directory/file_locks.py": "a directory that the user named, or a cache",
    "checkpoint/mirror/journal_mirror.py": "a new temporary directory",
    "checkpoint/state/unfinished_caches.py": "a tf.data cache that the user named",
    "cli/demo/command.py": "the demo's directory, which the user named",
    "cli/demo/training.py": "the demo's own new directory",
    "cli/doctor/storage_check.py": "a new file of a random name, and empty directories",
    "cli/inspect/replay.py": "a new temporary directory",
    "cli/simulate/command.py": "a new file that the user named",
    "cli/report/command.py": "a page that the user named",
    "cli/run/console.py": "/dev/null and the standard output",
    "cli/run/orphan_reaper.py": "gets its descriptors of core/contained.py",
    "cli/run/logs.py": "gets its descriptors of core/contained.py",
    "cli/run/snapshot_space.py": "a directory of this user, closed to others",
    "core/contained.py": "the root, which is the user's choice",
    "core/journal.py": "makes the directory of a journal, and writes nothing there",
    "core/heartbeat.py": "a file in memory, by its descriptor in /proc",
    "handler/exit.py": "/dev/null",
    "jax/compile_cache.py": "a directory of this user, closed to others",
    "handler/snapshots.py": "a directory of this user, closed to others",
    "keras/callbacks/callback_files.py": "a log that the user named, as Keras opens it",
    "notice/file.py": "reads a file that the user named; a pipe is not waited for",
    "storage/fsspec_store.py": "objects of fsspec, which have no links",
    "storage/file_reading.py": "reads, and waits for no pipe",
}
# Modules that create `LocalFiles` without a root below which no link is followed.
ROOTLESS = {
    "checkpoint/directory/file_locks.py": "makes a directory that the user named",
    "cli/doctor/storage_check.py": "syncs a directory that the user named",
    "cli/run/command.py": "makes the checkpoint directory, which the user named",
    "storage/files.py": "replaces a file that the user named",
}
CHANGES = {
    "os": {
        *("open", "remove", "unlink", "rmdir", "rename", "replace", "mkdir"),
        *("makedirs", "link", "symlink", "truncate", "utime"),
    },
    "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"},
}
PATH_CHANGES = {
    *("write_text", "write_bytes", "unlink", "rmdir", "mkdir", "touch"),
    *("symlink_to", "hardlink_to"),
}
# Modules that import from `tfpreempt` itself, like a user's program.
VISITORS = {
    "cli/__init__.py": "shows the version",
    "cli/demo/jax_worker.py": "is written as a user's program",
    "cli/demo/tensorflow_worker.py": "is written as a user's program",
    "cli/demo/training.py": "is written as a user's program",
}
# The decision uses no I/O, clock or TensorFlow: these modules import only each other.
PURE = {
    "coordination/state_machine.py": {
        "tfpreempt.core.events",
        "tfpreempt.coordination.protocol_types",
    },
    "coordination/protocol_types.py": {"tfpreempt.core.events"},
}
PURE_STDLIB = {
    *("__future__", "collections", "dataclasses", "enum", "typing"),
    "typing_extensions",  # of what Python 3.10 lacks
}

FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "base.py", "manager2.py"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """An imported module, and the position of the import."""

    file: str
    line: int
    module: str
    is_for_types: bool

    def __str__(self) -> str:
        return f"tfpreempt/{self.file}:{self.line} imports {self.module}"


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {
        relative(path): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Yields all syntax nodes of all files."""
    return [(file, node) for file, tree in sources().items() for node in ast.walk(tree)]


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    """Parses all files without garbage collection: the trees are many small objects."""
    gc.disable()
    yield
    for cached in (imports, nodes, sources):
        cached.cache_clear()
    gc.enable()


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imported_modules(node: ast.stmt) -> Iterator[str]:
    """Returns the modules of an import statement; names are not submodules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            own = below.startswith("tfpreempt.") and is_module(below)
            foreign = (node.module or "").startswith("tensorflow.")
            yield below if own or foreign else str(node.module)


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


@functools.cache
def imports() -> tuple[Import, ...]:
    for_types = {
        inner
        for _, node in nodes()
        if isinstance(node, ast.If) and is_name(node.test, "TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return tuple(
        Import(
            file=file,
            line=node.lineno,
            module=module,
            is_for_types=node in for_types,
        )
        for file, node in nodes()
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in imported_modules(node)
    )


def station(file: str) -> str:
    """The room of a file: its folder, or in the root its own name."""
    return file.partition("/")[0].removesuffix(".py")


def test_every_file_has_a_floor() -> None:
    homeless = {file for file in sources() if station(file) not in FLOORS}
    assert homeless == {"__init__.py"}


def test_imports_go_down_only() -> None:
    wrong = []
    for each in imports():
        parts = each.module.split(".")
        home = station(each.file)
        # The front door may show everything.
        if parts[0] != "tfpreempt" or home == "__init__":
            continue
        if len(parts) == 1:
            if each.file not in VISITORS:
                wrong.append(f"{each}: name the module instead")
            continue
        target = station(parts[1])
        allowed = (
            target == home
            or FLOORS[target] < FLOORS[home]
            or (home, target) in SAME_FLOOR
        )
        if not allowed:
            wrong.append(f"{each}: {home} may not import {target}")
    assert wrong == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not even for types: a cycle is one idea in two files."""
    below: dict[str, set[str]] = {file: set() for file in sources()}
    for each in imports():
        path = each.module.replace(".", "/").removeprefix("tfpreempt/")
        for target in (f"{path}.py", f"{path}/__init__.py"):
            # The `__init__` of a package may import modules that import the package.
            if target in below and not each.file.endswith("__init__.py"):
                below[each.file].add(target)
    graph = graphlib.TopologicalSorter(below)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def needs_tensorflow(file: str) -> bool:
    folders = tuple(f"{folder}/" for folder in TENSORFLOW_FOLDERS)
    return file in TENSORFLOW or file.startswith(folders)


def target_of(each: Import) -> str:
    """Returns the file of tfpreempt that an import names; empty for other libraries."""
    path = each.module.replace(".", "/").removeprefix("tfpreempt/")
    return next(
        (f for f in (f"{path}.py", f"{path}/__init__.py") if f in sources()), ""
    )


def test_only_listed_files_import_tensorflow() -> None:
    """Not in a function either, and not by a private name, which imports its module.

    An import for types is none: Python does not execute it.
    """
    frameworks_of = {"tensorflow", "keras", "tf_keras", "jax"}
    users = {
        e.file
        for e in imports()
        if e.module.split(".")[0] in frameworks_of and not e.is_for_types
    }
    users |= {
        file for file, module, _ in taken_by_name() if module in private_api.MODULES
    }
    assert [file for file in sorted(users) if not needs_tensorflow(file)] == []
    of_users = {e.file for e in imports() if target_of(e) in users}
    assert TENSORFLOW.keys() <= users | of_users, "delete the entries without a use"


def test_the_core_imports_tensorflow_only_through_adapters() -> None:
    found = [
        str(each)
        for each in imports()
        if not needs_tensorflow(each.file) and not each.is_for_types
        if needs_tensorflow(target_of(each))
    ]
    assert found == []
    adapters = {
        f"{module.replace('.', '/').removeprefix('tfpreempt/')}.py"
        for module in frameworks.ADAPTERS["tensorflow"].values()
    }
    assert [file for file in sorted(adapters) if not needs_tensorflow(file)] == []


def taken_by_name() -> Iterator[tuple[str, str, str]]:
    """File, module and name where a file takes `private_api.module.name`."""
    for file, node in nodes():
        match node:
            case ast.Attribute(ast.Attribute(ast.Name("private_api"), module), name):
                yield file, module, name


def test_only_listed_files_touch_the_eager_context() -> None:
    users = {file for file, module, _ in taken_by_name() if module == "eager_context"}
    assert users == EAGER_CONTEXT.keys()


def test_only_private_api_imports_private_names() -> None:
    below = ("tensorflow.python", "keras.src", "tf_keras.src", "jax._src", "jaxlib")
    found = [str(each) for each in imports() if each.module.startswith(below)]
    found += [
        f"tfpreempt/{file}:{node.lineno}"
        for file, node in nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(below)
        and file != "core/private_api.py"
    ]
    assert found == []


def listed_names() -> dict[str, set[str]]:
    """Returns the private names that the list has for each module, in parts."""
    listed: dict[str, set[str]] = {}
    for feature in private_api.FEATURES.values():
        for module, names in feature.names.items():
            parts = re.split(r"[ .:,]", names)
            listed.setdefault(module, set()).update(parts)
    return listed


def test_each_name_of_a_private_module_is_listed() -> None:
    listed = listed_names()
    assert listed.keys() == private_api.MODULES.keys()
    taken = [each for each in taken_by_name() if each[1] in private_api.MODULES]
    assert [each for each in taken if each[2] not in listed[each[1]]] == []


def test_private_attributes_of_others_are_listed() -> None:
    listed = set(private_api.RENAMED.values()).union(*listed_names().values())
    own = {name for _, node in nodes() for name in defined_by(node)}
    unlisted = [
        f"tfpreempt/{file}:{node.lineno}: {ast.unparse(node)}"
        for file, node in nodes()
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and node.attr not in own | listed | OTHER_PRIVATE.keys()
        and file not in LENIENT
    ]
    assert unlisted == []


def defined_by(node: ast.AST) -> Iterator[str]:
    """Returns the functions, classes and attributes of self in a statement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from {node.attr} if is_name(node.value, "self") else ()


def test_front_door_loads_nothing_at_import() -> None:
    loaded = {
        each.module
        for each in imports()
        if each.file == "__init__.py" and not each.is_for_types
    }
    assert loaded <= {"__future__", "importlib", "sys", "typing"}


@pytest.mark.parametrize("file", sorted(PURE))
def test_the_agreement_is_pure(file: str) -> None:
    used = {each.module for each in imports() if each.file == file}
    stdlib = {name for name in used if name.split(".")[0] in PURE_STDLIB}
    assert used - stdlib <= PURE[file]


def test_no_pickle_in_the_package() -> None:
    names = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = [str(each) for each in imports() if each.module.split(".")[0] in names]
    assert found == []


def is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and "sleep" in {each.name for each in node.names}
    is_named = isinstance(node, ast.Attribute) and node.attr == "sleep"
    return is_named and ast.unparse(node) == "time.sleep"


def test_only_listed_files_sleep() -> None:
    found = [
        f"tfpreempt/{file}:{node.lineno}"
        for file, node in nodes()
        if file not in SLEEPERS and is_sleep(node)
    ]
    assert found == []


def changes_files(node: ast.AST) -> bool:
    """Whether a call makes, writes, renames or deletes a file, by its path."""
    if not isinstance(node, ast.Call):
        return False
    keywords = {each.arg for each in node.keywords}
    if {"dir_fd", "src_dir_fd", "dst_dir_fd", "opener"} & keywords:
        return False
    match node.func:
        case ast.Attribute(ast.Name(module), name) if module in CHANGES:
            return name in CHANGES[module]
        case ast.Name("open") | ast.Attribute(_, "open"):
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            return any(re.fullmatch("(?=.*[wax+])[rwaxbt+]+", str(m)) for m in given)
        case ast.Attribute(_, "replace" | "rename"):  # of a Path; others take two
            return len(node.args) == 1 and not keywords
        case ast.Attribute(_, name):
            return name in PATH_CHANGES
    return False


def test_only_listed_files_change_files_by_their_paths() -> None:
    found = {file for file, node in nodes() if changes_files(node)}
    assert found == CHANGE_FILES.keys()


def test_only_listed_files_follow_links_everywhere() -> None:
    found = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"LocalFiles", "LocalLeaseFileSystem"}
        and not (node.args or node.keywords)
    }
    assert found == ROOTLESS.keys()


def test_exceptions_are_still_needed() -> None:
    """Remove a deleted file, or a file without the exception, from the lists."""
    listed = {*EAGER_CONTEXT, *SLEEPERS, *VISITORS, *PURE, *LENIENT}
    assert listed <= sources().keys()
    used = {node.attr for _, node in nodes() if isinstance(node, ast.Attribute)}
    assert OTHER_PRIVATE.keys() <= used


def test_no_finalizers() -> None:
    """Threads and files have owners that close them; `__del__` closes by accident."""
    found = [
        f"tfpreempt/{file}:{node.lineno}"
        for file, node in nodes()
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert found == []


def test_every_file_states_its_one_job() -> None:
    silent = [file for file, tree in sources().items() if not ast.get_docstring(tree)]
    assert silent == []


def test_no_file_without_a_subject() -> None:
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "campaigns")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert [path for path in paths if path.name in FORBIDDEN_NAMES] == []


# In `keras/`, and yet without Keras and TensorFlow: the callback, and what leads to the
# fit on JAX.
PURE_KERAS = (
    "keras/__init__.py",
    "keras/backends/keras3.py",
    "keras/bad_steps.py",
    "keras/callback.py",
    "keras/data/jax_data.py",
    "keras/fit/training.py",
)
JAX = (
    "jax/compile_cache.py",
    "jax/distributed.py",
    "jax/pytree_state.py",
    "jax/shards.py",
    "jax/values.py",
)


@pytest.mark.slow  # starts a process
def test_all_other_modules_are_imported_without_tensorflow() -> None:
    files = [file for file in sources() if not needs_tensorflow(file)]
    files.remove("__main__.py")  # is the command line
    names = [
        f"tfpreempt/{file}".removesuffix(".py").removesuffix("/__init__")
        for file in (*files, *PURE_KERAS, *JAX)
    ]
    lines = [f"import {name.replace('/', '.')}" for name in names]
    code = "\n".join([f"import sys\n{WITHOUT_TENSORFLOW}", *lines])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_make_test_fast_collects_without_tensorflow(
    pytestconfig: pytest.Config,
) -> None:
    """One unmarked import of it takes longer than the collection of all other tests."""
    unwanted = set(re.findall(r"not (\w+)", pytestconfig.option.markexpr))
    is_fast = {"tensorflow", "multiprocess", "slow"} <= unwanted
    assert not (is_fast and "tensorflow" in sys.modules)


# --- the size of classes and functions ------------------------------------------------

# Most methods and attributes of a class, most parameters of a function.
LIMITS: dict[type[ast.AST], tuple[int, ...]] = {
    ast.ClassDef: (30, 16),
    ast.FunctionDef: (8,),
}
# Larger ones, and why. The numbers may only fall.
LARGER: dict[str, tuple[tuple[int, ...], str]] = {
    "checkpoint/restore/opening.py:open_directory": (
        (14,),
        "all that a directory consists of: each caller names the few that it needs",
    ),
    "cli/run/options.py:RunOptions": ((4, 18), "a value: the command line"),
    "cli/status/run_status.py:Worker": ((0, 17), "a value: the state of a worker"),
    "handler/handler.py:PreemptionCheckpointHandler.__init__": ((14,), "public"),
    "handler/run.py:Run": (
        (22, 28),
        "its counters and marks are read and written by the session, the rounds, the "
        "end of training and a fit: a value for each would be one more name to follow",
    ),
    "handler/status_file.py:WorkerStatus": ((0, 17), "a value: the status file"),
    "keras/callback.py:PreemptionCallback.__init__": ((12,), "public"),
    "platforms/config.py:TerminationConfig.__init__": ((9,), "public"),
}


def definitions() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Yields `file:name` or `file:Class.method`, and the statement."""
    for file, node in nodes():
        if isinstance(node, ast.ClassDef | ast.Module):
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for each in node.body:
                if isinstance(each, ast.ClassDef | ast.FunctionDef):
                    yield f"{file}:{prefix}{each.name}", each


def size_of(tree: ast.ClassDef | ast.FunctionDef) -> tuple[int, ...]:
    """Returns the methods and attributes of a class, or a function's parameters."""
    if isinstance(tree, ast.FunctionDef):
        given = tree.args
        parameters = (*given.posonlyargs, *given.args, *given.kwonlyargs)
        return (len({each.arg for each in parameters} - {"self", "cls"}),)
    methods = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    fields = {
        each.target.id
        for each in tree.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if not re.search("ClassVar|InitVar|KW_ONLY", ast.unparse(each.annotation))
    }
    assigned = {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_name(each.value, "self")
    }
    return len(methods), len((fields | assigned) - methods)


def test_no_class_and_no_function_is_larger_than_its_limit() -> None:
    def is_over(size: tuple[int, ...], limit: tuple[int, ...]) -> bool:
        return any(map(operator.gt, size, limit))

    large = {
        name: size_of(node)
        for name, node in definitions()
        if is_over(size_of(node), LIMITS[type(node)])
    }
    listed = {name: limit for name, (limit, _) in LARGER.items()}
    assert listed.keys() <= large.keys(), "delete the entries that are not needed"
    grown = {n: s for n, s in large.items() if is_over(s, listed.get(n, (0, 0)))}
    assert grown == {}


# --- packages ------------------------------------------------------------------------


def packages() -> list[Path]:
    """Returns the folders of all packages below `tfpreempt/`."""
    return sorted({path.parent for path in PACKAGE.rglob("*/__init__.py")})


def package_of(file: str) -> str:
    return file.rpartition("/")[0]


def test_a_package_names_its_callers() -> None:
    """The last line of a package's `__init__` names the packages that import it.

    A package of another folder is named by that folder.
    """
    callers: dict[str, set[str]] = {}
    for each in imports():
        home, target = package_of(each.file), package_of(target_of(each))
        if target and home != target and not target.startswith(f"{home}/"):
            is_near = home.partition("/")[0] == target.partition("/")[0]
            named = home if is_near else home.partition("/")[0]
            callers.setdefault(target, set()).add(named or "tfpreempt")
    for folder in packages():
        name = relative(folder)
        text = ast.get_docstring(sources()[f"{name}/__init__.py"]) or ""
        found = re.search(r"^Imported by ([^.]*)\.$", text, re.MULTILINE)
        assert found is not None, f"{name}/__init__.py does not name its callers"
        expected = ", ".join(sorted(callers.get(name, ()))) or "no other package"
        assert " ".join(found[1].split()) == expected, name


# The packages of checkpoint/: each imports from those before it only.
CHECKPOINT = ("directory", "lease", "bundles", "state", "tensors", "mirror", "restore")


def test_the_packages_of_checkpoint_import_in_one_direction() -> None:
    below: dict[str, set[str]] = {name: set() for name in CHECKPOINT}
    for each in imports():
        home, target = package_of(each.file), package_of(target_of(each))
        if home.startswith("checkpoint/") and target.startswith("checkpoint/"):
            below[home.partition("/")[2]].add(target.partition("/")[2])
    for name, targets in below.items():
        assert targets - {name} <= set(CHECKPOINT[: CHECKPOINT.index(name)]), name


# How many files a package may have; checkpoint/ itself has none but its `__init__`.
MOST_FILES = {
    "checkpoint": 0,
    **{f"checkpoint/{name}": 12 for name in CHECKPOINT},
    "handler": 16,
}


def test_a_package_has_few_files() -> None:
    counts = {name: len([*(PACKAGE / name).glob("*.py")]) - 1 for name in MOST_FILES}
    assert {n: c for n, c in counts.items() if c > MOST_FILES[n]} == {}
