"""`accelerate launch` as a program: `python accelerate_launch.py OPTIONS PROGRAM ARGUMENTS`.

The command itself imports torchvision if it is installed, which needs help beside a CPU-only PyTorch.
"""

from __future__ import annotations

from contextlib import suppress

from accelerate.commands.launch import main

from ispasp.integrations.torchvision import import_torchvision

# Without a GPU and with --cpu, accelerate starts several processes by mpirun only; --multi_gpu starts them as torchrun.
TWO = (
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--main_process_port",
    "0",
    "--dynamo_backend",
    "no",
)

if __name__ == "__main__":
    with suppress(ImportError):
        import_torchvision()
    main()
