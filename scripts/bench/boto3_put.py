#!/usr/bin/env python3
"""boto3 as a peer: boto3_put.py crt|classic FILE KEY

Uploads FILE as parts of 16 MiB, 8 at once, with the transfer client that is named. Endpoint and keys come from the environment, the bucket from
BENCH_BUCKET.
"""

import os
import sys

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("crt", "classic"):
        sys.exit(__doc__)
    client, path, key = sys.argv[1:]
    s3 = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
    config = TransferConfig(
        multipart_chunksize=16 << 20, multipart_threshold=16 << 20, max_concurrency=8, preferred_transfer_client=client
    )
    s3.upload_file(path, os.environ["BENCH_BUCKET"], key, Config=config)


if __name__ == "__main__":
    main()
