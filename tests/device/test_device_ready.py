from tests.device.ready import Ready
import time
def test_try(ready: Ready) -> None:
    for s in (ready.doctor_before, ready.bundled, ready.pushed): print(s.status, s.out, s.err)
    for cmd in (("doctor",),("run", ready.package,"--ids","3 1 4 1","--backend","cpu","--threads","1"),("run", ready.package,"--ids","3 1 4 1","--backend","cpu","--threads","1","--json"),("push","--bundle",ready.bundle,ready.package),
      ("run", ready.package,"--ids","3 1 4 1"),
      ("calibrate", ready.package,"--backend","cpu","--threads","1"),
      ("bench", ready.package,"--backend","cpu","--threads","1","--tokens","4,8","--rounds","2")):
        t=time.time(); s=ready.estream(*cmd); print(cmd, time.time()-t, s.status, s.out, s.err, flush=True)
    ready.wait_for_silence()
    assert 0
