"""One agent writes to memory of another agent, and notifies it. Set NIXL_PLUGIN_DIR to the folder
of the plugin. Agents in two processes must send each other their metadata and addresses."""

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

size = 1 << 20
writer, owner = (
    nixl_agent(name, nixl_agent_config(backends=["FISHPLATE"])) for name in ("writer", "owner")
)
source, target = np.full(size, 7, np.uint8), np.zeros(size, np.uint8)
for agent, array in (writer, source), (owner, target):
    agent.register_memory([(array.ctypes.data, size, 0, "")], "DRAM")

writer.add_remote_agent(owner.get_agent_metadata())
ours = writer.get_xfer_descs([(source.ctypes.data, size, 0)], "DRAM")
theirs = writer.get_xfer_descs([(target.ctypes.data, size, 0)], "DRAM")
transfer = writer.initialize_xfer("WRITE", ours, theirs, "owner", b"written")
assert writer.transfer(transfer) != "ERR"
while not owner.get_new_notifs().get("writer"):
    assert writer.check_xfer_state(transfer) != "ERR"
assert (target == source).all()
print(f"{size} bytes arrived before their notification")
