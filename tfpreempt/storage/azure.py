"""ObjectStore in Azure Blob Storage.

A URI names the container, and the environment names the storage account. Names of
metadata have no "-": Azure accepts only identifiers of C#. Blocks of an upload that was
killed are deleted by Azure after a week.
"""

from __future__ import annotations

from typing import Any

from obstore.store import AzureStore as Client

from tfpreempt.storage.obstore_store import ObstoreStore, advice_on


class AzureStore(ObstoreStore):
    """Store of the objects below a prefix of a container; see `ObstoreStore`."""

    scheme = "az"
    endpoint_variables = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    variables = "that begin with AZURE_; AZURE_STORAGE_ACCOUNT_NAME is required"
    token_key = "tfpreempt_writer"
    crc_key = "tfpreempt_crc32c"
    advice = advice_on(
        missing="Create the container {bucket!r} (`az storage container create`), or "
        "correct its name or AZURE_STORAGE_ACCOUNT_NAME.",
        denied="Give this identity the role Storage Blob Data Contributor on "
        "{bucket!r}; reading alone needs Storage Blob Data Reader.",
        unknown="Check AZURE_STORAGE_ACCOUNT_NAME, and set AZURE_STORAGE_ACCOUNT_KEY "
        "or AZURE_STORAGE_SAS_TOKEN, or run on a machine with a managed identity.",
        late="Use a longer timeout, or check the network. Without an account key or "
        "SAS token, a token is first requested from the machine's metadata server.",
        failed="The service or the network failed: check AZURE_STORAGE_ACCOUNT_NAME "
        "and AZURE_STORAGE_ENDPOINT, or retry later.",
    )

    def _client(self, options: dict[str, Any]) -> Client:
        return Client(self._name, **options)
