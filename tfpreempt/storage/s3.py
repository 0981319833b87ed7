"""ObjectStore in S3, or in a service with S3's protocol."""

from __future__ import annotations

import os
from typing import Any

from obstore.store import S3Store as Client

from tfpreempt.storage.obstore_store import ObstoreStore, advice_on


class S3Store(ObstoreStore):
    """Store of the objects below a prefix of a bucket in S3; see `ObstoreStore`."""

    scheme = "s3"
    endpoint_variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    variables = "that begin with AWS_"
    advice = advice_on(
        missing="Create the bucket {bucket!r} or correct its name.",
        denied="Allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:ListBucket on {bucket!r}.",
        unknown="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
        "AWS_ENDPOINT_URL, if the service is not Amazon's), or run with an instance "
        "role. ~/.aws is not read.",
        late="Use a longer timeout, or check the network. Without AWS_ACCESS_KEY_ID, "
        "credentials are first requested from the machine's metadata server.",
        failed="The service or the network failed: check AWS_ENDPOINT_URL, or retry "
        "later.",
    )

    def _client(self, options: dict[str, Any]) -> Client:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return Client(self._name, region=region or "us-east-1", **options)
