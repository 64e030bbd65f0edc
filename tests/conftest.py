"""One thread per process: the models are tiny, and two workers share the machine."""
import torch

torch.set_num_threads(1)
