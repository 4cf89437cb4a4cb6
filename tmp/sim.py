import sys, statistics, time
sys.path[:0]=["tests/unit","."]
from worlds import *
from cpmcu.engine.chooser import ShapeChooser
from cpmcu.engine.shapes import shapes_of
SH = shapes_of(4,8,32)
full = [PLAIN]*3+[s for s in SH[1:] for _ in range(3)]+[PLAIN]*3
now = [PLAIN]*3+[SH[1]]*3+[PLAIN]*3
def shares(world, shapes, warm, num_seqs, seeds=5, spans=((0,300),(300,1000),(1000,2000))):
    _, best = best_fixed(world, 2000, num_seqs=num_seqs, shapes=shapes)
    out=[]
    for seed in range(seeds):
        e=Engine(world, ShapeChooser(shapes), seed, num_seqs)
        e.warm_up(warm)
        row=[]
        for a,b in spans:
            s,t=e.outcome.seconds,e.outcome.tokens
            e.run(b-a)
            row.append(best*(e.outcome.tokens-t)/num_seqs/(e.outcome.seconds-s))
        out.append(row)
    return [statistics.median(r[i] for r in out) for i in range(len(spans))], [min(r[i] for r in out) for i in range(len(spans))], _, e
if __name__=="__main__":
    t0=time.time()
    for name,warm in (("full",full),):
        worst=[]
        for tg in (0.0,0.5):
            for n in (1,4,16):
                line=[]
                for rate in (0.3,0.5,0.8,0.9):
                    w=World(measured_h100, constant(rate), tg)
                    med,mn,b,e=shares(w,SH,warm,n)
                    line.append(f"{b} "+" ".join(f"{m*100:3.0f}" for m in med)+f" min{mn[-1]*100:3.0f}")
                print(name,tg,n,"|".join(line))
    print(SH, time.time()-t0)
