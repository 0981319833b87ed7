"""What docs/performance.md shows: one figure for each thing that is measured.

The text is written by hand, and so is `limit`, the sentence that says why where a bar
is not met. The numbers come from the rows under docs/performance/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any


class Plot(Enum):
    """How a figure is drawn."""

    DOTS = "a line for each row, a dot for each side"
    LINES = "time over the number of workers"
    PARTS = "what the wall time went to"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One section of the page.

    Attributes:
        name: of its plot, and of its link.
        title: the heading.
        text: what is measured, and against what.
        benches: whose rows it shows.
        label: tells its rows apart; a format of a row's fields (`label_of`).
        sides: fields with a median and a p95, and their names; dots and lines are
            drawn of them.
        more: further columns by field; "a.b" is the field b of a.
        limit: what the time is made of where the bar is not met.
        plot: how it is drawn.
        scale: of the values, as matplotlib names it.
    """

    name: str
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
        """What a row is called in the table and in the plot."""
        return self.label.format(
            **{k: "none" if v is None else v for k, v in row.items()}
        )


FIGURES = (
    Figure(
        name="notice_to_exit",
        title="From SIGTERM to the last process gone",
        text="Two workers are preempted, with tfpreempt's handler and with "
        "`tf.distribute.experimental.PreemptionCheckpointHandler` in turn, their "
        "directory in memory; beside them a plain write and fsync of as many bytes.",
        benches=("notice_to_exit",),
        label="signal to {signalled}, {state}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain write"},
        more={
            "profile.to_decision": "to the decision",
            "profile.to_commit": "to the commit",
            "profile.to_gone": "to the end",
        },
        limit="With 4,096 tensors the first save of a process takes most of the time "
        "to the commit: TensorFlow searches for the objects and their keys, on both "
        "workers at once. The time to the end is Python and TensorFlow taking the "
        "process apart.",
    ),
    Figure(
        name="notice_to_commit",
        title="What a preemption adds to step and write",
        text="From SIGTERM to the commit, less what training took until its last step "
        "ended, less a plain write and fsync of as many bytes in the same round. Two "
        "workers, their directory in memory, one of them signalled. The bar is a tenth "
        "of the plain write, at least 100 ms.",
        benches=("notice_to_commit",),
        label="{mebibytes:,} MiB",
        sides={"ours": "added", "raw": "plain write"},
        limit="Beside one plain write stand two that share two processors and the "
        "memory's bandwidth, each with sums; the index, the manifest and the marker "
        "come after. The plain write itself varies by as much as the bar.",
    ),
    Figure(
        name="copies_written",
        title="What the workers write",
        text="Bytes that both workers pass to write calls between the signal and their "
        "end, in copies of the state, beyond their own shards of the commit, their "
        "journals and logs. Each worker writes a share of one copy; TensorFlow's "
        "handler writes a copy on each. The preemptions are those above.",
        benches=("copies_written",),
        label="{mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow"},
        more={"uneven": "largest share in smallest"},
    ),
    Figure(
        name="agreement",
        title="Agreement at scale",
        text="From a notice until the last living worker knows at which step to save, "
        "and until the one that is told to go may train on, in simulated time: ours is "
        "the shipped coordinator, TensorFlow's and JAX's are the messages of their "
        "protocols, on the same store of 20,000 messages a second. With dead workers "
        "TensorFlow's handler never trains on, and JAX never decides.",
        benches=("agreement_scale", "agreement_10000"),
        label="{protocol}, {workers:,} workers, {dead} dead",
        sides={"known": "all know", "through": "goes on"},
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
        title="Sixteen real workers",
        text="All are processes under MultiWorkerMirroredStrategy on one machine; one "
        "of them gets SIGTERM, in each of many starts of one run. Seconds from the "
        "signal until all know at which step to save, and until the last process is "
        "gone.",
        benches=("many_workers",),
        label="{of}, {workers} workers",
        sides={"ours": "tfpreempt"},
        more={"steps_lost": "steps lost"},
        limit="Sixteen processes end on two cores, and the end of one, with TensorFlow "
        "in it, takes a third of a second of a core; the notice and the decision are "
        "through long before.",
    ),
    Figure(
        name="goodput",
        title="Goodput under preemptions",
        text="The share of the wall time that goes to steps which the final state "
        "holds, of a training of two workers one of which is struck again and again: "
        "by SIGTERM, its machine gone after a grace, or by SIGKILL. A round is a "
        "start. A way that ignores SIGTERM trains through the grace, and gets more out "
        "of each start.",
        benches=("goodput",),
        label="{strike}, {way}",
        sides={"goodput": "goodput", "wasted_of_a_life": "wasted steps of a start"},
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
        title="A commit",
        text="A whole synced commit, from the capture to the marker, against "
        "`tf.train.Checkpoint.write`, which syncs nothing and has no sums of files; "
        "beside them a plain write and fsync of the same memory by as many threads. "
        "The states take turns. The bar is for states in memory: on a disk only our "
        "side waits for the disk.",
        benches=("commit_speed",),
        label="{state}, {mebibytes:,} MiB, {place}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain write"},
        more={"tensors": "tensors", "capture_us_each": "capture, us a tensor"},
        limit="Both processors write at once: the kernel's pages and copies are most "
        "of the time, as in a plain write, and sums take about a sixth. Where other "
        "programs need a processor, two threads lose more than TensorFlow's one.",
    ),
    Figure(
        name="small_tensors",
        title="Many small tensors",
        text="Commits of 4,096 tensors against commits of 16 tensors of the same "
        "bytes, in memory; both are those above.",
        benches=("small_tensors",),
        label="{mebibytes:,} MiB, {place}",
        sides={"ours": "4,096 tensors", "theirs": "16 tensors"},
        limit="A small tensor takes 25 µs more: 13 for the capture (the walk over the "
        "objects, the read, the tensor's memory), 4 for its entry in the index, and 8 "
        "for its own write, checksum and turn at Python's lock.",
    ),
    Figure(
        name="async_save",
        title="What a periodic save costs training",
        text="How long a save stalls the steps, how much slower they are until it is "
        "committed, and how long that takes: asynchronous, with `async_save=False`, "
        "and by `tf.train.Checkpoint.write` with its asynchronous option, which syncs "
        "and commits nothing; beside the stall a copy of the state in memory. For a "
        "step of `model.fit`, the stall is the time between the last batch of an epoch "
        "and the end of the next batch, less that time in a fit without tfpreempt. The "
        "bar of a stall is 1.3 copies, and 30 µs for each tensor.",
        benches=("async_save",),
        label="{of}, step: {step}, {state}, {mebibytes:,} MiB",
        sides={
            "ours": "tfpreempt",
            "waited": "waited for",
            "theirs": "TensorFlow",
            "orbax": "OrbaxCheckpoint",
            "raw": "one copy",
        },
        more={"copies": "stall in copies", "of_waited": "slower, of a waited save"},
        limit="Steps that need all processors lose those that the write takes, "
        "whatever writes; a step of `model.fit` here is such a step. At an epoch of a "
        "ResNet-50 the main thread needs 80 ms of processor time: 20 for two walks for "
        "untracked objects, 22 for two looks at Python values, 11 for the values held "
        "for the end of the epoch, and the rest for the capture and the copy.",
    ),
    Figure(
        name="parallel_save",
        title="A save by all workers",
        text="`save()` with two workers on one machine, each of which writes a share "
        "of the state, against one by the chief alone; both take turns in one "
        "training. The two share the processors and the disk, so this says that the "
        "deal costs nothing; on machines of their own they have two of each.",
        benches=("parallel_save",),
        label="{state}, {mebibytes:,} MiB, {place}",
        sides={"ours": "by all", "theirs": "by the chief"},
        more={"workers": "workers"},
        limit="The chief alone keeps both processors of this machine busy, so that the "
        "deal cannot gain time. It costs the other worker's capture at the same time, "
        "and the chief's look at what each worker wrote.",
    ),
    Figure(
        name="snapshot",
        title="What snapshots in memory cost, and what they save",
        text="The share of the time that they cost steps that wait for a device, in "
        "percent; and the steps that a worker under `tfpreempt run` makes again after "
        "SIGKILL, with them and with commits each minute alone.",
        benches=("snapshot",),
        label="{of}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "without"},
    ),
    Figure(
        name="restore_speed",
        title="A restore",
        text="The first restore of a process: the newest commit is found, verified and "
        "restored, against `tf.train.Checkpoint.read` of the same files; beside them a "
        "plain read of the files by as many threads, which drops what it has read. "
        "Each restore has a process of its own, and all files are in memory.",
        benches=("restore_speed",),
        label="{state}, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "plain read"},
        more={"tensors": "tensors"},
        limit="Bytes go into fresh memory, which the kernel clears page by page: with "
        "the read 0.5 s of processor time for a GiB. Of the transformer's restore 0.08 "
        "s are Python on the main thread; the rest is that read, on two threads.",
    ),
    Figure(
        name="verify_speed",
        title="`tfpreempt verify`",
        text="Every byte of one file or many is read and summed up, against reading "
        "the same files by as many threads and no more, from the page cache and from "
        "the disk.",
        benches=("verify_speed",),
        label="{files:,} files, {mebibytes:,} MiB, from the {read_from}",
        sides={"ours": "tfpreempt", "theirs": "plain read"},
        limit="From the page cache the sums show most: made at 25 GB/s, they cost a "
        "fifth to a quarter of copying at 7.",
    ),
    Figure(
        name="resume_latency",
        title="The first resumed batch of `model.fit`",
        text="From the start of the process to the end of the first trained batch: of "
        "a restart, and of the same program without tfpreempt, which begins with the "
        "first batch; beside them a plain read of the commit's files. The bar is 1.1 "
        "times the program without tfpreempt, and the plain read.",
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
        limit="Until the first batch the workers agree on a commit and the chief "
        "verifies it. The first batch contains the restore (0.4 s for 1.2 GiB) and the "
        "trace of the step; what else it takes longer by is not known yet.",
    ),
    Figure(
        name="position_restore",
        title="The place in the data",
        text="A fresh iterator is set to a position and gives its first batch: batch "
        "1,000,000 of an epoch against batch 100. The bar is for our pipeline, the "
        "others are there to compare.",
        benches=("position_restore",),
        label="{pipeline}",
        sides={"ours": "batch 1,000,000", "theirs": "batch 100"},
        more={"exact": "exact", "state_bytes": "bytes of state"},
        scale="log",
    ),
    Figure(
        name="position_in_files",
        title="The place in files of records",
        text="As above, in a million small records in TFRecord files: batch 100,000 "
        "against batch 100. Ours reads each record where an index says that it lies, "
        "in an order of all records; TensorFlow's reads the files from end to end and "
        "shuffles by a buffer. The bar is for ours.",
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
        title="A step whose input a strategy distributes",
        text="The iterator of `tfpreempt.data.distribute` against TensorFlow's own, "
        "which cannot be saved: a step that takes a global batch and looks at each of "
        "its numbers, by one and by the other in turn. Batches of ours are copied to "
        "the devices by the step, or ahead of it; TensorFlow's always are ahead.",
        benches=("distributed_input",),
        label="{replicas} replicas, {mebibytes:,} MiB, copied {copied}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow"},
    ),
    Figure(
        name="step_overhead",
        title="What a quiet step costs",
        text="A call of `handler.run(noop)` less a bare `noop()`, against the same of "
        "TensorFlow's handler, and `handler.check()`; beside them the bare call.",
        benches=("step_overhead",),
        label="{call}",
        sides={"ours": "tfpreempt", "theirs": "TensorFlow", "raw": "bare call"},
        more={"functions_called": "functions called"},
    ),
    Figure(
        name="callback_overhead",
        title="What the quiet callback costs a batch of `model.fit`",
        text="The time in each batch that is spent in the callback and not in Keras; "
        "beside it a whole batch of the smallest model without a callback, and what "
        "whole fits show to be added, by us and by a `BackupAndRestore` that never "
        "saves.",
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
        title="From a change in the world to the flag",
        text="A signal, a file, or a metadata server says that the machine goes; timed "
        "is until the handler's flag is up. What is polled may be late by its "
        "interval.",
        benches=("notice_latency",),
        label="{source}, interval {interval}",
        sides={"ours": "tfpreempt"},
        more={"longest": "longest"},
        scale="log",
    ),
    Figure(
        name="notice_quiet",
        title="What listening costs",
        text="The processor time of a process that only listens while nothing happens.",
        benches=("notice_quiet",),
        label="{source}",
        sides={"ours": "tfpreempt"},
        more={"seconds": "seconds", "requests": "requests"},
        limit="The bar is for one cloud; no machine hears of all at once.",
    ),
    Figure(
        name="quiet_memory",
        title="What a process keeps",
        text="Resident memory, threads and descriptors after many quiet steps, and "
        "after many handlers that were made and closed, less those before.",
        benches=("quiet_memory",),
        label="{count:,} {over}",
        sides={"ours": "tfpreempt"},
        more={"threads_more": "threads", "descriptors_more": "descriptors"},
        scale="symlog",
    ),
    Figure(
        name="mirror_speed",
        title="A commit to a bucket and back",
        text="An upload and a download of a commit, with all checksums, against "
        "`requests` moving the same bytes in as many streams and checking nothing; "
        "the server is on this machine.",
        benches=("mirror_speed",),
        label="{way}, {data_files} data files, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt", "theirs": "requests"},
    ),
    Figure(
        name="mirror_memory",
        title="The memory that a move takes",
        text="By how much the process grows at most while a commit goes up or comes "
        "down.",
        benches=("mirror_memory",),
        label="{way}, {data_files} data files, {mebibytes:,} MiB",
        sides={"ours": "tfpreempt"},
    ),
    Figure(
        name="mirror_step_overhead",
        title="Steps while a commit is copied",
        text="A training step of a program whose commits are copied to a bucket behind "
        "it, against the same without a mirror, in turns.",
        benches=("mirror_step_overhead",),
        label="{mebibytes} MiB every {save_every} steps",
        sides={"ours": "with a mirror", "theirs": "without"},
        more={
            "while_copying": "ratio while copying",
            "cpu_ratio": "ratio of processor time",
        },
        limit="The bucket's server takes its share of the same cores here, which a "
        "real one does not.",
    ),
    Figure(
        name="path",
        title="How much there is to read",
        text="The functions of the package that one real preemption, and one real "
        "restart, call on the first of two workers; nothing is timed.",
        benches=("path",),
        label="{phase}, {kind}",
        sides={"functions": "functions", "thread_changes": "thread changes"},
        more={"files": "files", "threads": "threads"},
    ),
)
