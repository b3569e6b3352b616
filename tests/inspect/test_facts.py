"""What is read off a compiler's words, and what follows for a card."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tilewise.inspect.compile import Compiled, disassemble, instruction_mix, spills_in_loops
from tilewise.inspect.facts import CARDS, Facts, fits, occupancy
from tilewise.ops.flash.configs import SHARED_MEMORY, family

FACTS = Facts("kernel", 90, 128, 0, 0, 1024, 0, 4, True, False, True, False, False, False, "13.4.59")

LOG = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'one_kernel' for 'sm_90a'
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for one_kernel
    56 bytes stack frame, 52 bytes spill stores, 152 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 56 bytes cumulative stack size, 488 bytes cmem[0]
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    " insufficient register resources"
)


def compiled(
    log: str, ptx: str = ".reqntid 256\nwgmma.mma_async.sync cp.async.bulk.tensor.4d", **metadata: int
) -> Compiled:
    kernel = SimpleNamespace(
        asm={"ptx": ptx, "ttir": "tt.dot"}, metadata=SimpleNamespace(name="one_kernel", shared=98304, **metadata)
    )
    return Compiled(kernel, 90, log)


def test_what_ptxas_says():
    facts = compiled(LOG, tmem_size=0).facts()
    assert (facts.registers, facts.spill_stores, facts.spill_loads, facts.shared_memory, facts.warps) == (
        255,
        52,
        152,
        98304,
        8,
    )
    assert (facts.multiplies, facts.wgmma, facts.wgmma_serialised, facts.tma, facts.tcgen05) == (
        True,
        True,
        False,
        True,
        False,
    )
    assert compiled(LOG + SERIALISED).facts().wgmma_serialised
    tcgen05 = compiled(LOG, ".maxntid 128\ntcgen05.mma.cta_group::1", tmem_size=512).facts()
    assert (tcgen05.warps, tcgen05.tcgen05, tcgen05.wgmma, tcgen05.tma, tcgen05.tensor_memory) == (
        4,
        True,
        False,
        False,
        512,
    )


def test_silence_of_ptxas_is_an_error():
    with pytest.raises(RuntimeError, match="one_kernel on sm_90"):
        compiled("nothing").facts()


def test_the_mix():
    sass = """
    .text.one_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR8][R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR8][R2.64] ;
        /*0030*/             @UP0  UTMALDG.4D [UR8], [UR4], desc[UR10] ;
        /*0040*/                   LDSM.16.MT88.4 R8, [R4] ;
        /*0050*/                   LDS R8, [R4] ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/                   HMMA.16816.F32.BF16 R24, R8, R12, R24 ;
        /*0080*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR5], tmem[UR46], idesc[UR47], !UPT ;
        /*0090*/                   MUFU.EX2 R5, R5 ;
        /*00a0*/                   MUFU.RCP R5, R5 ;
        /*00b0*/                   FFMA R5, R5, R6, R7 ;
        /*00c0*/                   FFMA2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*00d0*/                   STG.E desc[UR8][R2.64], R5 ;
        /*00e0*/                   STS [R4], R5 ;
        /*00f0*/                   STL [R1], R5 ;
        /*0100*/                   LDL R5, [R1] ;
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*0130*/                   EXIT ;
    """
    mix = {
        "matrix": 3,
        "exp2": 1,
        "fma": 2,
        "global loads": 3,
        "shared loads": 2,
        "stores": 2,
        "barriers": 2,
        "local": 2,
        "all": 20,
    }
    assert instruction_mix(sass) == mix


@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "warps", "expected"),
    [
        # 255 registers of 32 threads are 8,160, in units of 256 8,192: two warps a quarter of 16,384.
        (90, 255, 1024, 8, (1, 8, "registers")),
        (90, 255, 1024, 4, (2, 8, "registers")),
        # 168 x 32 = 5,376: three warps a quarter, 12 in all.
        (90, 168, 1024, 4, (3, 12, "registers")),
        # 115,712 + 1,024 bytes fit 233,472 twice.
        (90, 128, 115_712, 4, (2, 8, "shared memory")),
        (90, 32, 0, 4, (16, 64, "warps")),
        (86, 32, 0, 4, (12, 48, "warps")),
        # One warp a block: 16 blocks of sm_86, 24 of sm_89, 32 of sm_80.
        (86, 32, 0, 1, (16, 16, "blocks")),
        (89, 32, 0, 1, (24, 24, "blocks")),
        (80, 32, 0, 1, (32, 32, "blocks")),
        # 98,304 + 1,024 bytes fit 102,400 once, and 167,936 once.
        (86, 64, 98_304, 8, (1, 8, "shared memory")),
        (80, 64, 98_304, 8, (1, 8, "shared memory")),
        (120, 64, 101_376, 8, (1, 8, "shared memory")),
        (120, 64, 101_377, 8, (0, 0, "shared memory")),
    ],
)
def test_occupancy(architecture, registers, shared, warps, expected):
    assert (
        occupancy(replace(FACTS, architecture=architecture, registers=registers, shared_memory=shared, warps=warps))
        == expected
    )


def test_tensor_memory_limits_blocks():
    facts = replace(FACTS, architecture=100, registers=32, tensor_memory=256)
    assert occupancy(facts) == (2, 8, "tensor memory")
    assert occupancy(replace(facts, tensor_memory=0)).limit == "warps"


def test_the_cards_are_those_that_the_tiles_are_chosen_for():
    for architecture, card in CARDS.items():
        assert SHARED_MEMORY[family(architecture)] == card.shared_memory
        assert fits(replace(FACTS, architecture=architecture, shared_memory=card.shared_memory))
        assert not fits(replace(FACTS, architecture=architecture, shared_memory=card.shared_memory + 1))


def test_what_the_disassembler_cannot_read_is_said():
    with pytest.raises(RuntimeError, match="nvdisasm cannot read it: .+"):
        disassemble(b"no code")


# A loop from .L_x_1 to the branch back; behind the end a wait, from where control comes back into the loop, and once
# more to what lies behind it.
LOOPED = """
        /*0000*/                   STL [R1+0x4], R0 ;
.L_x_1:
        /*0010*/                   FFMA R2, R2, R3, R4 ;
        /*0020*/              @!P3 BRA `(.L_x_8) ;
.L_x_7:
        /*0030*/                   BRA.U UP2, `(.L_x_9) ;
        /*0040*/                   FADD R2, R2, R3 ;
.L_x_9:
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   LDL.64 R0, [R1+0x4] ;
.L_x_3:
        /*0070*/                   LDL R0, [R1+0x8] ;
        /*0080*/                   EXIT ;
.L_x_8:
        /*0090*/              @!P4 BRA `(.L_x_8) ;
        /*00a0*/               @P5 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_7) ;
.L_x_10:
        /*00c0*/                   BRA `(.L_x_10) ;
"""


def test_a_spill_in_a_loop_is_told_from_one_around_it():
    assert spills_in_loops(LOOPED) == 0
    for line in ("FADD R2, R2, R3", "FFMA R2, R2, R3, R4"):
        assert spills_in_loops(LOOPED.replace(line, "STL.128 [R1+0x10], R4")) == 1
    # In the wait that the loop may go through.
    assert spills_in_loops(LOOPED.replace("/*00b0*/ ", "/*00a8*/  LDL R4, [R1] ;\n        /*00b0*/ ")) == 1
    # Without the branch back there is no loop, wherever the wait returns to.
    straight = LOOPED.replace("@P0 BRA `(.L_x_1)", "NOP").replace("FADD R2, R2, R3", "LDL R4, [R1]")
    assert spills_in_loops(straight) == 0
