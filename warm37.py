import sys, torch, dataclasses
from pathlib import Path
from hipforge.cli import decode_step, decode_twin
shape = decode_step.read(Path(sys.argv[1])); d, s = shape.layers
shape = dataclasses.replace(shape, layers=(min(d,1),min(s,1)))
with torch.no_grad():
    for name in decode_twin.PEERS:
        for b in map(int, sys.argv[2].split(",")):
            try: decode_twin.Peer(shape, name, torch.device("cuda")).step(b, 2048)()
            except Exception as e: print(name, b, type(e), str(e)[:300])
torch.cuda.synchronize()
