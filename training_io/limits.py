"""The largest numbers of a training run, for recipes, the launchpad and the command line alike.

Nobody needs more; what is far beyond them ends a process without a word, or in PyTorch's.
"""

MAX_STEPS = 999_999_999  # a checkpoint's name has nine digits
MAX_THREADS = 1_024
MAX_LAYERS = 1_024  # what each computes is held until its gradients are known
MAX_WIDTH = 65_536  # two of them are the sides of one matrix: 16 GiB in float32
