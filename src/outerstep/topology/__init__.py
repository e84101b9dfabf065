"""How contributions become an agreement: one protocol (protocol.py), one folder per topology with what only it uses.

server/     a parameter server
group/      the processes of one torchrun job, which are one worker of a server together
allreduce/  the ranks of one process group, each a worker
torchft/    replica groups that come and go, by torchft's quorums
gossip/     peers that vote on every round; node/ is a peer's voice, which knows no tensors
"""
