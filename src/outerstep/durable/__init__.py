"""What must survive a kill at any instant: the disk as few operations, and a journal on top of it. No tensors."""
