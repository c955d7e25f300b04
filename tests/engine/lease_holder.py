"""A process that takes the step lease and keeps it: python lease_holder.py LIBRARY SEGMENT PLACE. It prints a line when
it has it. It uses the library alone, so that it starts within milliseconds."""

import ctypes
import mmap
import sys
import time

library = ctypes.CDLL(sys.argv[1])
library.penstock_lease_open.restype = ctypes.c_void_p
library.penstock_lease_open.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double)
library.penstock_lease_take.argtypes = (ctypes.c_void_p, ctypes.c_int64)
library.penstock_lease_wait.argtypes = (ctypes.c_void_p,)
with open(sys.argv[2], "r+b") as file:
    segment = mmap.mmap(file.fileno(), 0)
address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
lease = library.penstock_lease_open(address, int(sys.argv[3]), 1.0)
if not library.penstock_lease_take(lease, 2**63 - 1):
    library.penstock_lease_wait(lease)
print("taken", flush=True)
while True:
    time.sleep(60)
