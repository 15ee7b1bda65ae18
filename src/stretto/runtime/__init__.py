"""Training on real processes, over torch.distributed.

Channels. Values of one name, made by one kind of action on one stage, for one worker, are a channel with a tag of its
own, in which they arrive in the order in which they were made. The receiving end always has one receive posted, so a
value travels while its receiver computes. The sending end copies the value into one flat buffer and goes on; how many
may wait follows from the schedule, so every worker can end any turn before another begins the next. (A fixed depth of
5 deadlocked with tied weights.)

Messages. 64 bytes say what comes; a value's layout (tuples, types, shapes, strides) is sent once and when it changes,
its numbers every time; nothing is pickled. Dense tensors keep their strides: a transposed one would else be computed
on in another order.

GPUs. Where every process has a GPU, values go by NCCL (`nccl.py`), each channel with a communicator of its own,
because receives on one run in the order in which they were posted. The 64 bytes go from host to host before, so a
receive occupies a GPU only when its sender has sent. Processes that share a GPU go through pinned memory.

Losses. After turn n every process hears the loss of minibatch n - lag, so no worker runs away. To stop together,
whoever is asked first names step + 2 lag + 2: nobody can have passed it.

Failures. A thread looks at what the process is doing once a second and tells it to the store when it takes long;
chains of waiting are read from that. At a normal end processes wait for each other, and say so in the store: the
thread of one that waits counts bytes, and cuts its connections once none has come for some seconds. A child of
torch.multiprocessing waits three seconds for the others; if they do not come it keeps its connections until it has
ended, so that its parent hears of the first error first.

Groups (`job_member.py`). A gloo group takes threads and descriptors, and one process cannot free its end while others
use theirs. So a Trainer leaves its groups to the next one: all processes agree, by one all-reduce, on a set that none
uses; each channel of the former user ends with a last message, after which its receiver posts no other receive.

Starting again. torch's launcher (2.13) keeps one store for all attempts of a job, in which restarted workers find the
addresses of the dead. On one machine each attempt has a prefix of its own; on several each round of the job has a
name and a prefix.

Memory: a training process tells glibc to keep what each step frees (`process_memory.py`).
"""

from stretto.runtime.failure import WorkerLostError
from stretto.runtime.job_member import Member, membership
from stretto.runtime.world import World, join

__all__ = ["Member", "WorkerLostError", "World", "join", "membership"]
