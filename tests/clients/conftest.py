import openai
import pytest

from folio_server import Server


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    assert server.stop() == 0, "".join(server.log)


@pytest.fixture
def serve():
    """Starts further servers with their own arguments."""
    servers = []

    def start(*args):
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def client_of(server, key="none", cls=openai.OpenAI):
    return cls(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=300)


@pytest.fixture
def client(server):
    return client_of(server)


@pytest.fixture(scope="session")
def model(server):
    return client_of(server).models.list().data[0].id
