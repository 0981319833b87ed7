"""The contents of docs/performance.md and docs/performance/*.md.

Each topic is a page, and each figure a section of a page. The texts are written by
hand, and so is `limit`, the reason why a target is missed. The numbers come from the
rows under docs/performance/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any


class Plot(Enum):
    """The form of a plot."""

    DOTS = "a line for each row, a dot for each side"
    LINES = "time over the number of workers"
    PARTS = "shares of the wall time"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A page under docs/performance/.

    Attributes:
        name: file name of the page, without its suffix.
        title: heading of the page.
        text: first sentences of the page.
    """

    name: str
    title: str
    text: str


TOPICS = (
    Topic(
        name="preemption",
        title="Performance of a preemption",
        text="How long two workers take from SIGTERM to the exit, and how many bytes "
        "they write. The comparison is TensorFlow's own handler.",
    ),
    Topic(
        name="coordination",
        title="Performance of the coordination",
        text="How long 10 to 10,000 workers take to agree on the step of the save. "
        "Up to 16 workers are real processes; larger numbers are simulated.",
    ),
    Topic(
        name="goodput",
        title="Goodput",
        text="The share of the wall time that a frequently interrupted training "
        "spends on useful steps.",
    ),
    Topic(
        name="save",
        title="Performance of saves",
        text="How long a commit takes, and how much a periodic save slows down "
        "training. The comparison is `tf.train.Checkpoint.write`.",
    ),
    Topic(
        name="restore",
        title="Performance of a restart",
        text="How long a restore, a verification and the first batch after a restart "
        "take. The comparisons are TensorFlow, and a program without tfpreempt.",
    ),
    Topic(
        name="input",
        title="Performance of input pipelines",
        text="How long a pipeline takes to resume at a position far into the data, "
        "and the cost of a distributed iterator whose position can be saved.",
    ),
    Topic(
        name="overhead",
        title="Overhead without a preemption",
        text="The cost of tfpreempt for steps without a notice, in time and memory, "
        "and the delay between a notice and the handler.",
    ),
    Topic(
        name="mirror",
        title="Performance of the mirror",
        text="How fast a commit reaches a bucket and returns, how much memory the "
        "transfer takes, and how much the upload slows down training.",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measurement, as a section of a page.

    Attributes:
        name: name of the plot and of the link.
        topic: name of the page.
        title: heading of the section.
        text: description of the measurement and of the comparison.
        benches: benchmarks whose rows the figure shows.
        label: name of a row, as a format of the fields of the row (`label_of`).
        sides: names of the fields with a median and a p95, which the plot shows.
        more: names of further columns, by field; "a.b" is the field b of a.
        limit: reason why a target is missed.
        plot: form of the plot.
        scale: scale of the values, as matplotlib names it.
    """

    name: str
    topic: str
    title: str
    text: str
    benches: tuple[str, ...]
    label: str
    sides: Mapping[str, str]
    more: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limit: str = ""
    plot: Plot = Plot.DOTS
    scale: str = "linear"

    def label_of(self, row: Mapping[str, Any]) -> str:
        """Returns the name of a row in the table and in the plot."""
        return self.label.format(
            **{k: "none" if v is None else v for k, v in row.items()}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of a row.

    Attributes:
        field: field of the row.
        rows: fields and values that select the row.
        name: name of the program, for a comparison.
    """

    field: str
    rows: Mapping[str, Any]
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A row of the first table of docs/performance.md.

    Attributes:
        figure: name of the figure.
        text: description of the value.
        ours: value of tfpreempt.
        theirs: values for comparison.
        unit: unit of the values.
    """

    figure: str
    text: str
    ours: Value
    theirs: tuple[Value, ...]
    unit: str = ""


_RESNET = {"state": "ResNet-50"}
_WAITS = {**_RESNET, "of": "stall", "step": "waits for a device"}
_TERM = {"strike": "SIGTERM"}
_KILL = {"strike": "SIGKILL"}
HEADLINES = (
    Headline(
        figure="notice_to_exit",
        text="SIGTERM to exit, two workers, ResNet-50",
        ours=Value(field="ours", rows=_RESNET),
        theirs=(Value(field="theirs", rows=_RESNET, name="TensorFlow's handler"),),
        unit="s",
    ),
    Headline(
        figure="goodput",
        text="steps repeated in ten preemptions by SIGTERM",
        ours=Value(field="wasted_steps", rows={**_TERM, "way": "tfpreempt"}),
        theirs=(
            Value(
                field="wasted_steps",
                rows={**_TERM, "way": "tensorflow_handler"},
                name="TensorFlow's handler",
            ),
            Value(
                field="wasted_steps",
                rows={**_TERM, "way": "backup_and_restore"},
                name="BackupAndRestore",
            ),
        ),
    ),
    Headline(
        figure="goodput",
        text="goodput, SIGTERM every 30 s, with start-up",
        ours=Value(field="goodput", rows={**_TERM, "way": "tfpreempt"}),
        theirs=(
            Value(
                field="goodput",
                rows={**_TERM, "way": "tensorflow_handler"},
                name="TensorFlow's handler",
            ),
            Value(
                field="goodput",
                rows={**_TERM, "way": "checkpoint_manager"},
                name="CheckpointManager",
            ),
        ),
    ),
    Headline(
        figure="goodput",
        text="goodput, SIGKILL every 30 s, with start-up",
        ours=Value(field="goodput", rows={**_KILL, "way": "tfpreempt_save_every"}),
        theirs=(
            Value(
                field="goodput",
                rows={**_KILL, "way": "checkpoint_manager"},
                name="CheckpointManager",
            ),
        ),
    ),
    Headline(
        figure="commit_speed",
        text="commit in memory, ResNet-50",
        ours=Value(field="ours", rows={**_RESNET, "place": "tmpfs"}),
        theirs=(
            Value(
                field="theirs",
                rows={**_RESNET, "place": "tmpfs"},
                name="`Checkpoint.write`, without sync",
            ),
        ),
        unit="s",
    ),
    Headline(
        figure="async_save",
        text="stall of training in a periodic save, ResNet-50",
        ours=Value(field="ours", rows=_WAITS),
        theirs=(
            Value(field="waited", rows=_WAITS, name="`async_save=False`"),
            Value(field="raw", rows=_WAITS, name="one copy of the state"),
        ),
        unit="s",
    ),
    Headline(
        figure="resume_latency",
        text="process start to first batch of a restarted `model.fit`, ResNet-50",
        ours=Value(field="ours", rows={"model": "ResNet-50"}),
        theirs=(
            Value(
                field="theirs", rows={"model": "ResNet-50"}, name="without tfpreempt"
            ),
        ),
        unit="s",
    ),
    Headline(
        figure="step_overhead",
        text="overhead of a step without a notice",
        ours=Value(field="ours", rows={"call": "run"}),
        theirs=(
            Value(field="theirs", rows={"call": "run"}, name="TensorFlow's handler"),
        ),
        unit="µs",
    ),
)

FIGURES = (
    Figure(
        name="notice_to_exit",
        topic="preemption",
        title="From SIGTERM to the exit of the last process",
        text="Two workers are preempted, alternately with tfpreempt's handler and "
        "with `tf.distribute.experimental.PreemptionCheckpointHandler`. The "
        'checkpoint directory is in memory. "Plain write" is a write and '
        "fsync of the same number of bytes.",
        benches=("notice_to_exit",),
        label="signal to {signalled}, {state}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain write"},
        more={
            "profile.to_decision": "to the decision",
            "profile.to_commit": "to the commit",
            "profile.to_gone": "to the end",
        },
        limit="In the time to the end, Python and TensorFlow shut the process down.",
    ),
    Figure(
        name="notice_to_commit",
        topic="preemption",
        title="Time added to the last step and a plain write",
        text="The time from SIGTERM to the commit, minus the rest of the running "
        "step, minus a plain write and fsync of the same bytes in the same "
        "round. Two workers train, one worker gets the signal, and the "
        "directory is in memory. The target is a tenth of the plain write, at "
        "least 100 ms.",
        benches=("notice_to_commit",),
        label="{mebibytes:,} MiB",
        sides={"ours": "added", "raw": "plain write"},
        limit="Two writes share two processors and the memory bandwidth, and both "
        "compute checksums; the plain write is alone. The index, the manifest "
        "and the marker follow. The plain write itself varies by as much as "
        "the target.",
    ),
    Figure(
        name="copies_written",
        topic="preemption",
        title="Bytes written in a preemption",
        text="Bytes that both workers pass to write calls between the signal and "
        "the exit, in copies of the state, without the workers' own shards of "
        "the commit, journals and logs. With tfpreempt each worker writes a "
        "share of one copy; with TensorFlow's handler each worker writes a "
        "copy. The preemptions are the preemptions of the first table.",
        benches=("copies_written",),
        label="{mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow"},
        more={"uneven": "largest share in smallest"},
    ),
    Figure(
        name="agreement",
        topic="coordination",
        title="Time to agree on a step",
        text="Simulated time from a notice until the last living worker knows the "
        "step of the save, and until the notified worker may continue "
        "training. The figure for tfpreempt comes from the shipped "
        "coordinator; TensorFlow and JAX are simulated by the messages of "
        "their protocols. All use the same store, with 20,000 messages per "
        "second. With crashed workers TensorFlow's handler never continues, and "
        "JAX never decides.",
        benches=("agreement_scale", "agreement_10000"),
        label="{protocol}, {workers:,} workers, {dead} crashed",
        sides={"known": "all know", "through": "continues"},
        more={
            "known_p99": "all know, p99",
            "undecided": "undecided",
            "messages_a_worker": "messages a worker",
            "wall_longest": "longest simulation, s",
        },
        plot=Plot.LINES,
    ),
    Figure(
        name="many_workers",
        topic="coordination",
        title="Sixteen real workers",
        text="Sixteen processes train under MultiWorkerMirroredStrategy on one "
        "machine, and one process gets SIGTERM, in each of many starts of one "
        "run. Measured are the seconds from the signal until all processes "
        "know the step of the save, and until the last process has exited.",
        benches=("many_workers",),
        label="{of}, {workers} workers",
        sides={"ours": "tfpreempt"},
        more={"steps_lost": "steps lost"},
        limit="Sixteen processes exit on two cores, and the exit of one process "
        "with TensorFlow takes a third of a second of one core. The notice "
        "and the decision are complete long before.",
    ),
    Figure(
        name="goodput",
        topic="goodput",
        title="Goodput under preemptions",
        text="The share of the wall time for steps that the final state contains. "
        "Two workers train, and one worker is stopped repeatedly: by SIGTERM, "
        "with its machine reclaimed after a grace period, or by SIGKILL. A "
        "round is one start. A program that ignores SIGTERM continues "
        "training through the grace period, and so trains longer in each "
        "start. After SIGKILL the wasted steps depend on the random moment of the "
        "kill: the samples of the three programs overlap, so these medians do not "
        'show a difference. The start-up counts in "goodput"; the details have '
        "the value without start-up.",
        benches=("goodput",),
        label="{strike}, {way}",
        sides={"goodput": "goodput", "wasted_of_a_life": "wasted steps per start"},
        more={
            "goodput_without_start_up": "without start-up",
            "useful_steps": "useful steps",
            "wasted_steps": "wasted steps",
            "strike_every_seconds": "struck every, s",
            "grace_seconds": "grace, s",
            "states_agree": "states agree",
        },
        plot=Plot.PARTS,
    ),
    Figure(
        name="commit_speed",
        topic="save",
        title="A commit",
        text="A complete synced commit, from the capture to the marker, against "
        "`tf.train.Checkpoint.write`, which neither syncs nor computes "
        'checksums. "Plain write" writes and syncs the same memory with the '
        "same number of threads. The states alternate. The target applies to "
        "states in memory: on a disk only tfpreempt waits for the disk.",
        benches=("commit_speed",),
        label="{state}, {mebibytes:,} MiB, {place}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain write"},
        more={"tensors": "tensors", "capture_us_each": "capture, us a tensor"},
        limit="Both processors write at the same time. Most of the time is spent in "
        "the kernel, for pages and copies, as in a plain write; checksums "
        "take about a sixth. If other programs need a processor, two threads "
        "lose more time than TensorFlow's single thread.",
    ),
    Figure(
        name="small_tensors",
        topic="save",
        title="Many small tensors",
        text="Commits of 4,096 tensors against commits of 16 tensors with the same "
        "number of bytes, in memory. The commits are those of the table "
        "above.",
        benches=("small_tensors",),
        label="{mebibytes:,} MiB, {place}",
        sides={"ours": "4,096 tensors", "theirs": "16 tensors"},
        limit="A small tensor takes 25 µs more: 13 µs for the capture (traversal of "
        "the objects, read, memory of the tensor), 4 µs for the entry in the "
        "index, and 8 µs for the write, the checksum and the wait for "
        "Python's lock.",
    ),
    Figure(
        name="async_save",
        topic="save",
        title="The cost of a periodic save for training",
        text="*Stall* is the time by which a save delays the steps, *slower* the "
        "additional time of the steps until the commit, and *written* the "
        "time until the commit. Compared are an asynchronous save, a save "
        "with `async_save=False`, and the asynchronous option of "
        '`tf.train.Checkpoint.write`, which neither syncs nor commits. "One '
        'copy" is a copy of the state in memory. For `model.fit` the stall is '
        "the time from the last batch of an epoch to the end of the next "
        "batch, minus the same time without tfpreempt. The target of a stall "
        "is 1.3 copies plus 30 µs for each tensor.",
        benches=("async_save",),
        label="{of}, step: {step}, {state}, {mebibytes:,} MiB",
        sides={
            "ours": "tfpreempt",
            "theirs": "TensorFlow",
            "waited": "waited for",
            "orbax": "OrbaxCheckpoint",
            "raw": "one copy",
        },
        more={"copies": "stall in copies", "of_waited": "slower, of a waited save"},
        limit="Steps that need all processors lose the processors that the write "
        "uses, whichever program writes; a step of `model.fit` here is such a "
        "step. At an epoch end of a ResNet-50 the main thread needs 80 ms of "
        "processor time: 20 ms for two traversals for untracked objects, 22 "
        "ms for two checks of Python values, 11 ms for the values held for "
        "the end of the epoch, and the rest for the capture and the copy.",
    ),
    Figure(
        name="parallel_save",
        topic="save",
        title="A save by all workers",
        text="`save()` with two workers on one machine. Either each worker writes "
        "a share of the state, or the chief writes the whole state; both "
        "alternate in one training. The workers share the processors and the "
        "disk, so the figure shows only that the division costs nothing. "
        "Workers on separate machines have twice the processors and disks.",
        benches=("parallel_save",),
        label="{state}, {mebibytes:,} MiB, {place}",
        sides={"ours": "by all", "theirs": "by the chief"},
        more={"workers": "workers"},
        limit="The chief alone keeps both processors of the machine busy, so the "
        "division cannot save time. The division costs the capture on the "
        "other worker at the same time, and the chief's check of the files of "
        "each worker.",
    ),
    Figure(
        name="snapshot",
        topic="goodput",
        title="Cost and benefit of snapshots in memory",
        text="The share of the time, in percent, that snapshots cost steps that "
        "wait for a device. Also the steps that a worker under `tfpreempt "
        "run` repeats after SIGKILL, with snapshots, and with commits once a "
        "minute instead.",
        benches=("snapshot",),
        label="{of}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "without"},
    ),
    Figure(
        name="restore_speed",
        topic="restore",
        title="A restore",
        text="The first restore of a process finds, verifies and restores the "
        "newest commit. The comparison is `tf.train.Checkpoint.read` of the "
        'same files. "Plain read" reads the files with the same number of '
        "threads and discards the bytes. Each restore has its own process, "
        "and all files are in memory.",
        benches=("restore_speed",),
        label="{state}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain read"},
        more={"tensors": "tensors"},
        limit="The bytes go into fresh memory, which the kernel clears page by "
        "page: with the read, 0.5 s of processor time per GiB. In the restore "
        "of the transformer the main thread spends 0.08 s in Python; the rest "
        "is the read, on two threads.",
    ),
    Figure(
        name="verify_speed",
        topic="restore",
        title="`tfpreempt verify`",
        text="Reads every byte of one or many files and computes checksums. The "
        "comparison only reads the same files with the same number of "
        "threads, from the page cache and from the disk.",
        benches=("verify_speed",),
        label="{files:,} files, {mebibytes:,} MiB, from the {read_from}",
        sides={"ours": "tfpreempt", "theirs": "plain read"},
        limit="From the page cache the checksums dominate: computed at 25 GB/s, "
        "they cost a fifth to a quarter of a copy at 7 GB/s.",
    ),
    Figure(
        name="resume_latency",
        topic="restore",
        title="The first batch of `model.fit` after a restart",
        text="From the start of the process to the end of the first trained batch. "
        "The comparison is the same program without tfpreempt, which trains "
        'from the first batch. "Plain read" reads the files of the commit. '
        "The target is 1.1 times the program without tfpreempt, plus the "
        "plain read.",
        benches=("resume_latency",),
        label="{model}, {mebibytes_read:,.0f} MiB",
        sides={"ours": "tfpreempt", "theirs": "without", "raw": "plain read"},
        more={
            "phases.import": "imports",
            "phases.build": "the model",
            "phases.begin": "until the first batch",
            "phases.step": "the first batch",
            "plain.step": "the first batch, without",
        },
        limit="Before the first batch the workers agree on a commit, and the chief "
        "verifies the commit. The first batch contains the restore (0.4 s for "
        "1.2 GiB) and the trace of the step. For a ResNet-50, the main thread also "
        "needs 0.35 s for four searches for attributes and 0.16 s for a search for "
        "unsaved values, and Python collects garbage once more (0.35 s). These times "
        "were measured when the trace took 1.5 times as long as in the table. "
        "Between runs of one program, the trace varies by 15 %.",
    ),
    Figure(
        name="resume_jax",
        topic="restore",
        title="The first batch of `model.fit` on JAX after a restart",
        text="As in the section before, with Keras on JAX, without and with "
        "`compile_cache=True`. The target is 1.3 times the program without "
        "tfpreempt, plus the plain read.",
        benches=("resume_jax",),
        limit="The restore of the transformer's 1.2 GiB takes 0.7 s longer than the "
        "start of a fit, and its first step takes 1 to 2 s more of processor time, of "
        "which the kernel takes 0.6 to 1.5 s. The medians scatter: in pairs of runs, "
        "the ratio is 1.28.",
        label="{model}, {cache}, {mebibytes_read:,.0f} MiB",
        sides={"ours": "tfpreempt", "theirs": "without", "raw": "plain read"},
        more={
            "processor.ours": "processor time",
            "processor.theirs": "processor time, without",
            "phases.step": "the first batch",
            "plain.step": "the first batch, without",
        },
    ),
    Figure(
        name="position_restore",
        topic="input",
        title="A position in arrays",
        text="A new iterator is set to a position and yields the first batch: "
        "batch 1,000,000 of an epoch against batch 100. The target applies to "
        "the pipeline of tfpreempt; the other rows are for comparison.",
        benches=("position_restore",),
        label="{pipeline}",
        sides={"ours": "batch 1,000,000", "theirs": "batch 100"},
        more={"exact": "exact", "state_bytes": "bytes of state"},
        scale="log",
    ),
    Figure(
        name="position_in_files",
        topic="input",
        title="A position in files of records",
        text="The same with a million small records in TFRecord files: batch "
        "100,000 against batch 100. tfpreempt reads each record at the offset "
        "from an index, in an order of all records. TensorFlow reads the "
        "files from start to end and shuffles in a buffer. The target applies "
        "to tfpreempt.",
        benches=("position_in_files",),
        label="{pipeline}",
        sides={"ours": "batch 100,000", "theirs": "batch 100"},
        more={
            "exact": "exact",
            "state_bytes": "bytes of state",
            "state_bytes_near": "at batch 100",
        },
        scale="log",
    ),
    Figure(
        name="distributed_input",
        topic="input",
        title="A step with distributed input",
        text="The iterator of `tfpreempt.data.distribute` against TensorFlow's "
        "iterator, which cannot be saved. A step takes a global batch and "
        "reads every number; both iterators alternate. With tfpreempt the "
        "step copies the batch to the devices, or the batch is copied ahead "
        "of the step. TensorFlow always copies ahead.",
        benches=("distributed_input",),
        label="{replicas} replicas, {mebibytes:,} MiB, copied {copied}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow"},
    ),
    Figure(
        name="step_overhead",
        topic="overhead",
        title="A step without a notice",
        text="The time of a call of `handler.run(noop)` minus a bare `noop()`, "
        "against the same call of TensorFlow's handler; and "
        '`handler.check_preemption()`. "Bare call" is the call of `noop()`.',
        benches=("step_overhead",),
        label="{call}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "bare call"},
        more={"functions_called": "functions called"},
    ),
    Figure(
        name="callback_overhead",
        topic="overhead",
        title="A batch of `model.fit` with the callback",
        text='The time of each batch in the callback, without Keras. "A batch" is '
        "a whole batch of the smallest model without a callback. The details "
        "show the time that tfpreempt, and a `BackupAndRestore` that never "
        "saves, add to whole fits.",
        benches=("callback_overhead",),
        label="{keras}",
        sides={"ours": "tfpreempt", "raw": "a batch"},
        more={
            "added.ours": "added to whole fits",
            "added.backup_and_restore": "by BackupAndRestore",
            "fetches.ours.main": "values fetched in 100 batches",
            "fetches.bare.main": "without a callback",
        },
        scale="log",
    ),
    Figure(
        name="notice_latency",
        topic="overhead",
        title="From the notice to the handler's flag",
        text="A signal, a file or a metadata server announces the preemption. "
        "Measured is the time until the handler's flag is set. A polled "
        "source may be late by its interval.",
        benches=("notice_latency",),
        label="{source}, interval {interval}",
        sides={"ours": "tfpreempt"},
        more={"longest": "longest"},
        scale="log",
    ),
    Figure(
        name="notice_quiet",
        topic="overhead",
        title="Processor time for listening",
        text="The processor time of a process that only listens for notices while "
        "none comes.",
        benches=("notice_quiet",),
        label="{source}",
        sides={"ours": "tfpreempt"},
        more={"seconds": "seconds", "requests": "requests"},
        limit="The target applies to one cloud. No machine listens to all clouds at "
        "once.",
    ),
    Figure(
        name="quiet_memory",
        topic="overhead",
        title="Memory, threads and descriptors",
        text="The growth of resident memory, threads and descriptors after many "
        "steps without a notice, and after many handlers that were created "
        "and closed.",
        benches=("quiet_memory",),
        label="{count:,} {over}",
        sides={"ours": "tfpreempt"},
        more={"threads_more": "threads", "descriptors_more": "descriptors"},
        scale="symlog",
    ),
    Figure(
        name="mirror_speed",
        topic="mirror",
        title="Upload and download of a commit",
        text="An upload and a download of a commit, with all checksums. The "
        "comparison moves the same bytes with `requests`, in the same number "
        "of streams, without checks. The server runs on the same machine.",
        benches=("mirror_speed",),
        label="{way}, {data_files} data files, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "requests"},
    ),
    Figure(
        name="mirror_memory",
        topic="mirror",
        title="Memory of a transfer",
        text="The largest growth of the process during an upload or a download of "
        "a commit.",
        benches=("mirror_memory",),
        label="{way}, {data_files} data files, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt"},
    ),
    Figure(
        name="mirror_step_overhead",
        topic="mirror",
        title="Training steps during an upload",
        text="A training step of a program whose commits are uploaded to a bucket "
        "in the background, against the same step without a mirror, "
        "alternately.",
        benches=("mirror_step_overhead",),
        label="{mebibytes} MiB every {save_freq} steps",
        sides={"ours": "with a mirror", "theirs": "without"},
        more={
            "while_copying": "ratio while copying",
            "cpu_ratio": "ratio of processor time",
        },
        limit="The server of the bucket uses the same cores here; a real bucket "
        "does not.",
    ),
    Figure(
        name="path",
        topic="preemption",
        title="Functions called in a preemption",
        text="The functions of the package that one real preemption, and one real "
        "restart, call on the first of two workers. Nothing is timed.",
        benches=("path",),
        label="{phase}, {kind}",
        sides={"functions": "functions", "thread_changes": "thread changes"},
        more={"files": "files", "threads": "threads"},
    ),
)
