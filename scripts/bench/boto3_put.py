#!/usr/bin/env python3
"""boto3 as a peer: boto3_put.py crt|classic FILE KEY

Uploads FILE as parts of 16 MiB, 8 at once, with the transfer client that is named. Endpoint and keys come from the environment, the bucket from
BENCH_BUCKET. The CRT client is made here and not by boto3, which would speak TLS to any endpoint.
"""

import os
import sys

import botocore.session
from botocore.config import Config

PART_LEN = 16 << 20
IN_FLIGHT = 8
PATH_STYLE = Config(s3={"addressing_style": "path"})


def put_classic(path, key):
    import boto3
    from boto3.s3.transfer import TransferConfig

    s3 = boto3.client("s3", config=PATH_STYLE)
    config = TransferConfig(
        multipart_chunksize=PART_LEN, multipart_threshold=PART_LEN, max_concurrency=IN_FLIGHT, preferred_transfer_client="classic"
    )
    s3.upload_file(path, os.environ["BENCH_BUCKET"], key, Config=config)


def put_crt(path, key):
    from s3transfer import crt

    session = botocore.session.get_session()
    region = os.environ["AWS_REGION"]
    serializer = crt.BotocoreCRTRequestSerializer(
        session, {"region_name": region, "endpoint_url": os.environ["AWS_ENDPOINT_URL"], "config": PATH_STYLE}
    )
    credentials = crt.BotocoreCRTCredentialsWrapper(session.get_credentials())
    client = crt.create_s3_crt_client(
        region, credentials.to_crt_credentials_provider(), num_threads=IN_FLIGHT, part_size=PART_LEN, use_ssl=False
    )
    with crt.CRTTransferManager(client, serializer) as manager:
        manager.upload(path, os.environ["BENCH_BUCKET"], key).result()


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("crt", "classic"):
        sys.exit(__doc__)
    client, path, key = sys.argv[1:]
    put = put_crt if client == "crt" else put_classic
    put(path, key)


if __name__ == "__main__":
    main()
