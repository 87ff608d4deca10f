// The fat binary of gpu_kernels.cu.
        .section .rodata
        .balign 64
        .globl  epd_bench_image
        .hidden epd_bench_image
epd_bench_image:
        .incbin EPD_BENCH_IMAGE
        .section .note.GNU-stack, "", %progbits
