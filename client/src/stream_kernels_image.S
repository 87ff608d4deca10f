// The fat binary of stream_kernels.cu.
        .section .rodata
        .balign 64
        .globl  epd_stream_kernels_image
        .hidden epd_stream_kernels_image
epd_stream_kernels_image:
        .incbin EPD_STREAM_KERNELS_IMAGE
        .section .note.GNU-stack, "", %progbits
