"""Calls of the functions of kernels/gpu, to be compiled for all GPUs: a file for each file there, with LAUNCHES.

    def decoded() -> None:
        data = torch.empty(4096, 576, dtype=torch.uint8, device="meta")
        group_decode(FORMATS["group4"], data, torch.empty(4096, 1024, dtype=torch.float16, device="meta"))

    LAUNCHES = (Launch("group4, float16", decoded, registers=64, loads={"group_decode_kernel": 16}),)

The test compiles every launch in one process, and slow ones do so for each GPU: few, well-chosen launches keep it short.
"""
