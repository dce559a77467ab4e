#!/usr/bin/env python3
"""The fastest Python client of S3, as a peer: obstore_client.py put|put-signed FILE KEY, or get-largest PREFIX

put writes FILE from memory (a mapping of tmpfs: nothing is copied before obstore does) as parts of 16 MiB, 8 at once, unsigned payload;
put-signed leaves obstore's default, a SHA-256 over every byte where the endpoint is plain HTTP. get-largest
reads the largest object under PREFIX as ranges of 16 MiB, 8 at once, and drops them. Endpoint and keys come from the environment, the bucket from BENCH_BUCKET.
"""

import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.store import S3Store

PART_LEN = 16 << 20
IN_FLIGHT = 8


def store(unsigned_payload):
    return S3Store(
        os.environ["BENCH_BUCKET"],
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region=os.environ["AWS_REGION"],
        unsigned_payload=unsigned_payload,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def put(path, key, unsigned_payload):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as raw:
        view = memoryview(raw)
        with obstore.open_writer(store(unsigned_payload), key, buffer_size=PART_LEN, max_concurrency=IN_FLIGHT) as writer:
            for start in range(0, len(view), PART_LEN):
                writer.write(view[start : start + PART_LEN])
        view.release()


def get_largest(prefix):
    source = store(True)
    objects = [item for page in obstore.list(source, prefix) for item in page]
    largest = max(objects, key=lambda item: item["size"])
    key, size = largest["path"], largest["size"]

    def one(start):
        wanted = min(PART_LEN, size - start)
        got = len(obstore.get_range(source, key, start=start, length=wanted))
        if got != wanted:
            raise ValueError(f"{got} bytes at {start} of {key}, not {wanted}")

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(one, range(0, size, PART_LEN)))


def main():
    match sys.argv[1:]:
        case ["put", path, key]:
            put(path, key, True)
        case ["put-signed", path, key]:
            put(path, key, False)
        case ["get-largest", prefix]:
            get_largest(prefix)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
