"""One torch thread per test process: several on few cores stall each other, and sums keep one order."""

import torch

torch.set_num_threads(1)
