"""An S3 of a test's own: moto's server, which is not ours."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("obstore", reason="pip install 'penstock[s3]'")
pytest.importorskip("moto", reason="pip install 'moto[s3]'")
pytest.importorskip("flask", reason="pip install flask flask-cors")

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class BucketServer:
    """A server with the bucket `models`."""

    def __init__(self, url: str) -> None:
        import boto3

        self.url = url
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="id",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="models")

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket="models", Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket="models", Key=key)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        found = BucketServer(url)
        yield found
        for each in found.client.list_objects_v2(Bucket="models").get("Contents", ()):
            found.delete(each["Key"])  # moto's stores are of the process, not of the server
        found.client.delete_bucket(Bucket="models")
    finally:
        server.stop()
