from scheduler_process import *
def test_x(tmp_path):
    s=SchedulerProcess(tmp_path).start()
    try:
        n=PlayedNode(s,"n1")
        print(n.register())
        s.create_pool("a")
        op=s.start_operation("a",3)
        n.beat_until(lambda: len(n.jobs_of(op))==3,"jobs")
        n.beat()
        print(s.get(f"operations/{op}"))
        print(s.yt("list","//sys/pools",bindings=False))
        for j in n.jobs_of(op): n.end(j)
        n.beat(); 
        print(s.state_of(op))
        print(s.stop())
        print(s.log())
    finally: s.close()
