# distutils: language = c++
"""A file that the events of this process go to. See recording.hpp."""

import json
import os

from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libcpp.string cimport string

from rmm_managed_bridge._native.process cimport CProcess, CRecording, RecordingShape, TextKind, process

import rmm_managed_bridge._native.process as native_process


cdef extern from "pool/pool_calls.hpp" namespace "rmm_bridge" nogil:
    CRecording* map_recording(CProcess* process, int file, const RecordingShape& shape) except +


def start(int file, uint64_t event_count, uint64_t block_count, uint64_t text_bytes, about):
    """Record into an open, empty file of the size that follows from the counts. `about`: a dictionary for the reader.

    Raises OSError if it cannot be mapped. The file may be closed afterwards. The caller sees to it that there is one at a time.
    """
    cdef RecordingShape shape
    shape.event_count = event_count
    shape.block_count = block_count
    shape.text_bytes = text_bytes
    cdef string text = json.dumps(about).encode()
    cdef CRecording* recording
    with nogil:
        recording = map_recording(process, file, shape)
    if recording == NULL:
        raise OSError(errno, os.strerror(errno))
    recording.name(TextKind.about, 0, 0, text)
    with native_process._tag_lock:  # so that none is missed that is made meanwhile
        for number, name in enumerate(native_process._frameworks):
            recording.name(TextKind.framework, number, 0, name.encode("utf-8", "surrogatepass"))
        for number in range(1, len(native_process._tags)):
            recording.name(
                TextKind.tag, number, native_process._outer_tags[number],
                native_process._tags[number].encode("utf-8", "surrogatepass"),
            )
        with nogil:
            process.begin_recording(recording)


def stop():
    """Write the last figures, and end. Does nothing without a recording, and in a forked child of the process that has it."""
    with nogil:
        process.end_recording()


def active():
    """Return True while this process records into a file."""
    return process.recording.load() != NULL
